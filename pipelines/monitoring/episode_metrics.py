"""episode_metrics: episodes -> figures with a sampling error: lengths, turns, tools, format, entropy, repeats, credit.

    episode ── figures_of ──> {figure: value} ── mean per task ──> [values] ── estimate_of ──> number, mean, standard error

Tasks are the units, as in `statistics`: episodes of one task are not independent. A figure of one agent is called
`<figure>/<agent>`; what each means is in pipelines/config/figures.py. Nothing here holds a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipelines.config.figures import figure_of
from pipelines.evaluation.guards import is_refusal
from pipelines.monitoring.drift import Sketch, sketch
from stores.traces.conventions import num_world_calls, num_world_steps
from stores.types import SOUND, EpisodeRewards, FinishReason, Trace, Turn

NEAR = 0.8
"""Share of common word trigrams from which on two texts are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure of a set of episodes, estimated over its tasks."""

    num: int
    """Tasks that have it, at least 2."""
    mean: float
    error: float
    """Standard error of the mean over tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A set of episodes that is checked as one, and later part of the history of others."""

    key: str
    """What it is of: the same window taken again replaces itself."""
    at: float
    """Unix seconds."""
    figures: Mapping[str, Estimate]
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
        """Returns the metrics as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Window:
        """The inverse of `to_json`."""
        figures = {name: Estimate(**estimate) for name, estimate in data["figures"].items()}
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
    """The figures of episodes; with `fixed_tasks`, the digest of a fixed set, also per task and without the prompts.

    Args: rewards, feedback: by episode id, of those that have them.
    """
    values: dict[str, dict[str, list[float]]] = {}
    prompts: dict[str, str] = {}
    for trace in traces:
        figures = figures_of(
            trace, (rewards or {}).get(trace.episode_id), feedback=(feedback or {}).get(trace.episode_id)
        )
        prompts[trace.task.task_id] = trace.task.prompt
        for name, value in figures.items():
            values.setdefault(name, {}).setdefault(trace.task.task_id, []).append(value)
    by_task = {name: {task: math.fsum(v) / len(v) for task, v in tasks.items()} for name, tasks in values.items()}
    if fixed_tasks:
        by_task.pop("prompt_words", None)
    return Window(
        key=key,
        at=at,
        figures={name: estimate_of(list(tasks.values()), name) for name, tasks in by_task.items() if len(tasks) > 1},
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
    """Of one episode; one that is no outcome of the policy has `failure_share` and no other: it says nothing about the team.

    `entropy`: mean over the sampled tokens of -log p(token), whose expectation at each place is the entropy of the
    distribution that the token was drawn from; of turns whose sampling is unfiltered, with the temperature they had.
    """
    figures = {"failure_share": float(trace.status not in SOUND)}
    if not trace.is_outcome:
        return figures
    turns = trace.turns
    figures |= {
        "turns": float(len(turns)),
        "tool_calls": float(len(trace.tool_calls) - num_world_calls(trace)),
        **({"world_steps": float(num_world_steps(trace))} if num_world_calls(trace) else {}),
        "refusal_share": float(is_refusal(trace.answer)),
        "prompt_words": float(len(trace.task.prompt.split())),
        **_of_turns(turns, per_episode=True),
    }
    if len(turns) > 1:
        figures["repeat_share"] = num_repeats([turn.completion_text for turn in turns]) / (len(turns) - 1)
    agents = dict.fromkeys(turn.agent for turn in turns)
    for agent in agents if len(agents) > 1 else ():
        own = _of_turns([turn for turn in turns if turn.agent == agent], per_episode=False)
        figures |= {f"{name}/{agent}": own[name] for name in own if name != "cut_share"}
    if rewards is not None:
        figures["outcome"] = rewards.outcome
        if rewards.rewards:
            mean = math.fsum(r.reward for r in rewards.rewards) / len(rewards.rewards)
            figures["reward_over_outcome"] = mean - rewards.outcome
    if feedback is not None:
        figures["feedback_score"] = feedback
    return figures


def _of_turns(turns: Sequence[Turn], *, per_episode: bool) -> dict[str, float]:
    """Args: per_episode: tokens are summed over the turns; otherwise their mean."""
    if not turns:
        return {}
    figures = {
        "format_share": sum(turn.is_format_ok for turn in turns) / len(turns),
        "cut_share": sum(turn.finish_reason is FinishReason.LENGTH for turn in turns) / len(turns),
    }
    if all(turn.completion_token_ids or not turn.completion_text for turn in turns):  # redacted turns have none
        total = sum(len(turn.completion_token_ids) for turn in turns)
        figures["completion_tokens"] = total / (1 if per_episode else len(turns))
    logprobs = [value for turn in turns if turn.sampling.is_unfiltered for value in turn.rollout_logprobs]
    if logprobs:
        figures["entropy"] = -math.fsum(logprobs) / len(logprobs)
    return figures


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


def estimate_of(values: Sequence[float], name: str) -> Estimate:
    """Mean over tasks and its error. Of a share with one task at 0 and one at 1 added (Agresti and Coull 1998): none that was
    never seen is held to be impossible.
    """
    num, mean = len(values), math.fsum(values) / len(values)
    more = (0.0, 1.0) if figure_of(name).compared_by == "difference" else ()
    return Estimate(num=num, mean=mean, error=standard_error([*values, *more]))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 of fewer than two values."""
    num = len(values)
    if num < 2:
        return 0.0
    mean = math.fsum(values) / num
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (num - 1) / num)
