"""vitals: episodes -> what they are like, in figures with a sampling error: lengths, turns, tools, format, entropy, repeats, credit.

    episode ── figures_of ──> {figure: value} ── mean per task ──> [values] ── vital_of ──> number, mean, standard error

Tasks are the units, as in `statistics`: episodes of one task are not independent. A figure of one agent is called
`<figure>/<agent>`. Nothing here holds a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipelines.evaluation.guards import is_refusal
from pipelines.monitoring.drift import Sketch, sketch
from stores.types import EpisodeRewards, EpisodeStatus, FinishReason, Trace, Turn

SOUND = (EpisodeStatus.OK, EpisodeStatus.TRUNCATED)
NEAR = 0.8
"""Share of common word trigrams from which on two texts are the same."""
DRIFT = "input_drift"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What a figure means and when it has become worse."""

    worse: Literal["higher", "lower", "both"]
    what: str
    """What an alarm says first."""
    try_: str
    compared_by: Literal["difference", "ratio"] = "ratio"
    """To what is usual; shares by their difference."""
    least: float = 0.0
    """Of a ratio: a usual value below this counts as this, so that twice nothing is no change."""


LOOK = "look at episodes (troupe show)"
FIGURES: Mapping[str, Figure] = {
    "completion_tokens": Figure(
        worse="both",
        what="the length of what is sampled has changed",
        try_=f"{LOOK}; train.overlong, loss.aggregation token_mean, a lower max_tokens",
        least=1,
    ),
    "turns": Figure(worse="both", what="the number of turns has changed", try_=f"{LOOK}; a limit on rounds", least=1),
    "tool_calls": Figure(
        worse="both", what="the number of tool calls has changed", try_=f"whether the tools answer; {LOOK}", least=1
    ),
    "format_faults": Figure(
        worse="higher",
        what="more turns are malformed",
        try_="a larger weight of format in the credit rule",
        compared_by="difference",
    ),
    "cut_turns": Figure(
        worse="higher",
        what="more turns are cut at max_tokens",
        try_="a higher max_tokens, train.overlong",
        compared_by="difference",
    ),
    "refusals": Figure(worse="higher", what="more answers are empty or decline", try_=LOOK, compared_by="difference"),
    "failures": Figure(
        worse="higher",
        what="more episodes fail",
        try_="the errors in the traces; tools, engines, deadlines",
        compared_by="difference",
    ),
    "entropy": Figure(
        worse="both",
        what="the entropy of sampling has changed",
        try_="loss.entropy_coef, loss.clip_high, a lower optimizer.lr; agents.*.temperature",
        least=0.1,
    ),
    "repeats": Figure(
        worse="higher",
        what="more turns repeat what was said before in the episode",
        try_=f"{LOOK}; credit per turn, so that a repeat earns nothing",
        compared_by="difference",
    ),
    "success": Figure(
        worse="lower",
        what="fewer tasks are solved",
        try_="troupe rollback; look at what changed",
        compared_by="difference",
    ),
    "reward_over_success": Figure(
        worse="higher",
        what="the reward has left the outcome behind (hacking)",
        try_="look at episodes with a high reward; make the credit rule pay the outcome",
        compared_by="difference",
    ),
    "feedback": Figure(
        worse="lower",
        what="callers judge answers worse",
        try_="troupe rollback; collect.from_service",
        compared_by="difference",
    ),
    "prompt_words": Figure(worse="both", what="prompts have another length", try_="tasks of the new kind", least=1),
    DRIFT: Figure(
        worse="higher", what="prompts are about something else", try_="train and test on tasks of the new kind"
    ),
    "seconds": Figure(worse="higher", what="answers take longer", try_="the dashboard: load; num_replicas", least=0.1),
}
"""By their names in `watch.floors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vital:
    """One figure of a set of episodes."""

    num: int
    """Tasks that have it, at least 2."""
    mean: float
    error: float
    """Standard error of the mean over tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A set of episodes that is judged as one, and later part of the history that others are judged by."""

    key: str
    """What it is of: the same window taken again replaces itself."""
    at: float
    """Unix seconds."""
    figures: Mapping[str, Vital]
    team_version: int | None = None
    """None where the team changes from window to window: in training."""
    tasks: str = ""
    """Digest of a fixed set of tasks; windows of other tasks say nothing about it."""
    by_task: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of a fixed set: figure -> task id -> mean."""
    sketch: Sketch | None = None
    """Of the prompts, where these are not fixed."""
    alarms: tuple[str, ...] = ()
    """Figures that were out of their usual range. A window with any is no part of what is usual, in no figure: what made one
    leave its range has moved others within theirs."""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Window:
        """The inverse of `to_json`."""
        figures = {name: Vital(**vital) for name, vital in data["figures"].items()}
        drawn = None if data["sketch"] is None else Sketch(**data["sketch"])
        return cls(**{**data, "figures": figures, "sketch": drawn, "alarms": tuple(data["alarms"])})


def window_of(
    traces: Iterable[Trace],
    *,
    key: str,
    at: float,
    rewards: Mapping[str, EpisodeRewards] | None = None,
    feedback: Mapping[str, float] | None = None,
    team_version: int | None = None,
    fixed_tasks: str = "",
) -> Window:
    """The vitals of episodes; with `fixed_tasks`, the digest of a fixed set, also per task and without the prompts.

    Args: rewards, feedback: by episode id, of those that have them.
    """
    values: dict[str, dict[str, list[float]]] = {}
    prompts: dict[str, str] = {}
    for trace in traces:
        found = figures_of(
            trace, (rewards or {}).get(trace.episode_id), feedback=(feedback or {}).get(trace.episode_id)
        )
        prompts[trace.task.task_id] = trace.task.prompt
        for name, value in found.items():
            values.setdefault(name, {}).setdefault(trace.task.task_id, []).append(value)
    by_task = {name: {task: math.fsum(v) / len(v) for task, v in tasks.items()} for name, tasks in values.items()}
    if fixed_tasks:
        by_task.pop("prompt_words", None)
    return Window(
        key=key,
        at=at,
        figures={name: vital_of(list(tasks.values()), name) for name, tasks in by_task.items() if len(tasks) > 1},
        team_version=team_version,
        tasks=fixed_tasks,
        by_task={name: {t: round(v, 6) for t, v in tasks.items()} for name, tasks in by_task.items()}
        if fixed_tasks
        else {},
        sketch=None if fixed_tasks or len(prompts) < 2 else sketch(prompts.values()),
    )


def figures_of(
    trace: Trace, rewards: EpisodeRewards | None = None, *, feedback: float | None = None
) -> dict[str, float]:
    """Of one episode; one that failed has `failures` and no other, as what it did says nothing about the team.

    `entropy`: mean over the sampled tokens of -log p(token), whose expectation at each place is the entropy of the
    distribution that the token was drawn from; of turns whose sampling is unfiltered, with the temperature they had.
    """
    found = {"failures": float(trace.status not in SOUND)}
    if found["failures"]:
        return found
    turns = trace.turns
    found |= {
        "turns": float(len(turns)),
        "tool_calls": float(len(trace.tool_calls)),
        "refusals": float(is_refusal(trace.answer)),
        "prompt_words": float(len(trace.task.prompt.split())),
        **_of_turns(turns, per_episode=True),
    }
    if len(turns) > 1:
        found["repeats"] = num_repeats([turn.completion_text for turn in turns]) / (len(turns) - 1)
    agents = dict.fromkeys(turn.agent for turn in turns)
    for agent in agents if len(agents) > 1 else ():
        own = _of_turns([turn for turn in turns if turn.agent == agent], per_episode=False)
        found |= {f"{name}/{agent}": own[name] for name in own if name != "cut_turns"}
    if rewards is not None:
        found["success"] = rewards.outcome
        if rewards.rewards:
            mean = math.fsum(r.reward for r in rewards.rewards) / len(rewards.rewards)
            found["reward_over_success"] = mean - rewards.outcome
    if feedback is not None:
        found["feedback"] = feedback
    return found


def _of_turns(turns: Sequence[Turn], *, per_episode: bool) -> dict[str, float]:
    """Args: per_episode: tokens are summed over the turns; otherwise their mean."""
    if not turns:
        return {}
    found = {
        "format_faults": sum(not turn.is_format_ok for turn in turns) / len(turns),
        "cut_turns": sum(turn.finish_reason is FinishReason.LENGTH for turn in turns) / len(turns),
    }
    if all(turn.completion_token_ids or not turn.completion_text for turn in turns):  # redacted turns have none
        total = sum(len(turn.completion_token_ids) for turn in turns)
        found["completion_tokens"] = total / (1 if per_episode else len(turns))
    logprobs = [value for turn in turns if turn.sampling.is_unfiltered for value in turn.rollout_logprobs]
    if logprobs:
        found["entropy"] = -math.fsum(logprobs) / len(logprobs)
    return found


def num_repeats(texts: Sequence[str]) -> int:
    """How many of an episode's texts say again what an earlier one said, whoever said it.

    Two texts are the same where the Jaccard index of their sets of word trigrams is at least `NEAR` (Broder 1997,
    resemblance of w-shingles); of fewer than three words, where the words are. Case and white space do not count, and an
    empty text repeats nothing.
    """
    earlier: list[frozenset[tuple[str, ...]]] = []
    num = 0
    for text in texts:
        words = text.lower().split()
        if not words:
            continue
        own = frozenset(tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2)))
        num += any(len(own & other) >= NEAR * len(own | other) for other in earlier)
        earlier.append(own)
    return num


def vital_of(values: Sequence[float], name: str) -> Vital:
    """Mean over tasks and its error. Of a share with one task at 0 and one at 1 added (Agresti and Coull 1998): none that was
    never seen is held to be impossible.
    """
    num, mean = len(values), math.fsum(values) / len(values)
    more = (0.0, 1.0) if FIGURES[base(name)].compared_by == "difference" else ()
    return Vital(num=num, mean=mean, error=standard_error([*values, *more]))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 of fewer than two values."""
    num = len(values)
    if num < 2:
        return 0.0
    mean = math.fsum(values) / num
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (num - 1) / num)


def base(name: str) -> str:
    """`entropy` of `entropy/solver`."""
    return name.partition("/")[0]
