"""The records that every layer shares: plain frozen dataclasses, standard library only.

A record crosses a process border (LanceDB row, journal, Serve call); the class that behaves lives elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any

SERVED = "troupe/served"
"""Key in the `outcome_metadata` of a captured answer: {"team", "team_version", "alias", "key", "is_trainable"}, with `alias`
`champion` or `candidate` at the time of the answer; where `collect` has taken it over also {"trace_id", "score"}."""

HINT_DIGITS = 4
NUM_HINTS = 16**HINT_DIGITS


class EpisodeStatus(StrEnum):
    """How an episode ended. `ok` and `truncated` are sound; for the others `Trace.cause` says who caused the failure."""

    OK = "ok"
    TRUNCATED = "truncated"
    AGENT_ERROR = "agent_error"
    TOOL_ERROR = "tool_error"
    TIMEOUT = "timeout"
    INFRA_ERROR = "infra_error"


SOUND = (EpisodeStatus.OK, EpisodeStatus.TRUNCATED)
"""The statuses of episodes that did not fail."""


class Cause(StrEnum):
    """Who caused the failure of an episode: that decides what the episode counts as (`serve_apps/episode/causes.py`)."""

    NONE = ""
    """The episode did not fail."""
    INFRASTRUCTURE = "infrastructure"
    """An engine, a service behind a tool, or a deadline of ours on a call: the episode is missing. It is repeated, then left
    out of the loss and of baselines; the gate counts it against the candidate."""
    POLICY = "policy"
    """What a model wrote: the episode is an outcome, the worst one of the credit rule, and it is trained on."""
    AUTHOR = "author"
    """The workflow, the program or the set-up, whatever a model wrote: the episode is missing, too, and shown as such."""


COUNTED = (Cause.NONE, Cause.POLICY)
"""The causes of episodes that are outcomes of the policy: they are scored, trained on and compared at the gate."""


class FinishReason(StrEnum):
    """Why one model call ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Purpose(StrEnum):
    """What an episode was run for. It is part of the episode's key, so that episodes of two purposes never collide."""

    TRAIN = "train"
    GATE = "gate"
    TEST = "test"
    AD_HOC = "ad_hoc"
    DEMONSTRATION = "demonstration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem: its prompt, reference answers and metadata."""

    task_id: str
    prompt: str
    answers: tuple[str, ...]
    """Reference answers; any match counts."""
    source: str = ""
    """The task's data set, for metrics per source."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values only. Under `FAMILY`, the problem that the task is a variant of."""


FAMILY = "family"
"""The key of a task's metadata that tasks of one problem share. They are drawn, split and looked at together, and no workflow needs it."""


def families(tasks: Iterable[Task]) -> dict[str, str]:
    """Returns, by task id, the family of each task that names one, and of the task whose own id is that name: the first form."""
    tasks = list(tasks)
    named = {task.task_id: str(task.metadata[FAMILY]) for task in tasks if task.metadata.get(FAMILY) not in (None, "")}
    first = set(named.values())
    return {task.task_id: task.task_id for task in tasks if task.task_id in first} | named


FILTERS: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""The settings of `Sampling` that cut the distribution, each with the value at which it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The settings by which a completion is sampled. Turns that train must be unfiltered: see `is_unfiltered`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    constraint: str = ""
    """What the completion had to match, as JSON (see `serve_apps/openai_api/constraints.py`); empty: it may be any text."""

    @property
    def is_unfiltered(self) -> bool:
        """Says whether the sampling distribution is the policy's own: scaled by temperature, and over the tokens that the
        constraint allows."""
        return self.temperature > 0 and all(getattr(self, name) == off for name, off in FILTERS.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One model call, given as token ids. It crosses to the engine as it is."""

    request_id: str
    model_group: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else changes the sampling, for callers of a gateway: penalties, `logit_bias` and the like, by vLLM's names. What is
    trained on never has any."""
    top_logprobs: int = 0
    """How many of the most likely tokens are told at each position."""
    is_streamed: bool = False
    """Whether tokens are told as they are sampled, and not all at the end, which costs less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to a `GenerateRequest`, as token ids."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probabilities under the sampling distribution, one per token."""
    finish_reason: FinishReason
    policy_version: int
    is_version_mixed: bool = False
    """True if the weights changed while this completion was sampled."""
    num_attempts: int = 1
    num_cached_tokens: int | None = None
    """How many of the prompt's tokens the engine took from its prefix cache; None: nobody asked an engine."""
    allowed_logprobs: Sequence[float] = ()
    """Where the constraint names allowed tokens, the log-probability of each in its order; together they are the distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call by one agent, with the exact token ids."""

    turn_index: int
    """Position in the episode's sequence of events (turns and tool calls share one count)."""
    agent: str
    model_group: str
    policy_version: int
    round_index: int
    parents: tuple[int, ...]
    """Events (by index) whose output this turn's prompt was built from."""
    prompt_text: str
    completion_text: str
    prompt_token_ids: Sequence[int]
    completion_token_ids: Sequence[int]
    rollout_logprobs: Sequence[float]
    sampling: Sampling
    seed: int
    finish_reason: FinishReason
    is_format_ok: bool
    format_fault: str
    """Empty where the format is ok; else what the output contract misses."""
    fields: Mapping[str, str]
    """The parts that the output contract parsed, by name."""
    start_s: float
    """Seconds since the episode began."""
    duration_s: float
    num_attempts: int = 1
    is_version_mixed: bool = False
    cut: Mapping[str, int] = field(default_factory=dict)
    """How many characters each input lost, because it did not fit."""
    num_cached_tokens: int | None = None
    """How many of the prompt's tokens the engine took from its prefix cache; None: unknown, as for a scripted reply."""
    option_logprobs: Mapping[str, float] = field(default_factory=dict)
    """For a choice, the log-probability of every option that was offered, by its name; empty for other turns, and for a scripted choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool in an episode, with what it read from and what came back."""

    call_index: int
    """Position in the episode's sequence of events (shared with `Turn.turn_index`)."""
    tool: str
    caller: str
    parents: tuple[int, ...]
    request: Mapping[str, Any]
    response: Any
    error: str
    start_s: float
    duration_s: float
    num_attempts: int = 1
    version: str = ""
    """What answered, where the tool says it: of an MCP server its name, its version, and a hash of the tool's schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The record of one episode. It never holds rewards: those are stored apart, by credit version."""

    episode_id: str
    run_id: str
    iteration: int
    purpose: Purpose
    team_key: str
    """Hash of workflow, prompts and policy versions, and for ad hoc episodes of the occasion: see `team_key`."""
    workflow: str
    task: Task
    group_id: str
    """Episodes of the same task in one iteration, purpose and team (GRPO sense)."""
    episode_index: int
    variant: str
    seed: int
    status: EpisodeStatus
    stop_reason: str
    error: str
    answer: str
    """The workflow's final answer, empty if there was none."""
    outcome_metadata: Mapping[str, Any]
    policy_versions: Mapping[str, int]
    """The version of every model group that acted or was meant to act."""
    is_version_mixed: bool
    """True if another version than the intended one sampled a turn or a part of one. Such an episode is left out of
    evaluations, and by default out of training."""
    turns: tuple[Turn, ...]
    tool_calls: tuple[ToolCall, ...]
    started_at: float
    """Unix seconds."""
    duration_s: float
    attempt: int = 1
    cause: Cause = Cause.NONE
    """Who caused the failure. Of a failed episode without one it is `infrastructure` for an `infra_error`, else `author`."""

    def __post_init__(self) -> None:
        if self.cause is Cause.NONE and self.status not in SOUND:
            is_infrastructure = self.status is EpisodeStatus.INFRA_ERROR
            object.__setattr__(self, "cause", Cause.INFRASTRUCTURE if is_infrastructure else Cause.AUTHOR)

    @property
    def is_outcome(self) -> bool:
        """Says whether the episode is an outcome of the policy: it did not fail, or the policy caused its failure."""
        return self.cause in COUNTED


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReward:
    """The reward of one turn: `reward = sum(weight * score)`, with the parts in `breakdown`."""

    turn_index: int
    agent: str
    model_group: str
    reward: float
    breakdown: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRewards:
    """The rewards of an episode's turns under one version of one credit rule."""

    episode_id: str
    run_id: str
    iteration: int
    purpose: Purpose
    credit_version: str
    outcome: float
    """The episode's result as a number in [0, 1] for verifiable tasks (accuracy is its mean)."""
    rewards: tuple[TurnReward, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesRef:
    """A pinned set of episodes: the rows of (run, iteration, purpose, team) at one tagged version of the table."""

    uri: str
    version: int
    """Version of the table; `tag` keeps it from being dropped."""
    tag: str
    run_id: str
    iteration: int
    purpose: Purpose
    team_key: str
    num_episodes: int
    """How many episodes the ref has, without the excluded groups."""
    excluded_groups: tuple[str, ...] = ()
    """Groups (`Trace.group_id`) of which only some episodes are stored; readers of the ref see none of these."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "excluded_groups", tuple(self.excluded_groups))  # JSON turns it into a list


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsRef:
    """A pinned set of reward rows for a `TracesRef`."""

    uri: str
    version: int
    tag: str
    run_id: str
    iteration: int
    purpose: Purpose
    credit_version: str
    num_episodes: int
    team_key: str = ""
    """Team of the `TracesRef`: nothing else tells gate episodes of candidate and champion apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersionRef:
    """A pointer to the immutable weights of one model group after one `train` (version 0: after the warm start)."""

    model_group: str
    version: int
    uri: str
    """Folder in Hugging Face layout with a `manifest.json`."""
    manifest_sha256: str


def episode_id(
    *,
    run_id: str,
    iteration: int,
    purpose: Purpose,
    team_key: str,
    task_id: str,
    episode_index: int,
    variant: str = "",
) -> str:
    """Returns the key of an episode: the same inputs always give the same key, on any machine.

    It is 32 hexadecimal digits, of which the first four are the iteration (see `hinted_iteration`) and the others a hash.
    """
    parts = (run_id, str(iteration), purpose.value, team_key, task_id, str(episode_index), variant)
    digest = sha256("\x1f".join(parts).encode()).hexdigest()
    return f"{iteration % NUM_HINTS:0{HINT_DIGITS}x}{digest[: 32 - HINT_DIGITS]}"


def hinted_iteration(episode_id: str) -> int | None:
    """Returns the iteration that an episode id, or its beginning, begins with; None where it begins with no number.

    It says where to look first: ids of other software are anything, and from iteration 65,536 on the number begins at 0 again.
    """
    hint = episode_id[:HINT_DIGITS]
    return int(hint, 16) if re.fullmatch(rf"[0-9a-f]{{{HINT_DIGITS}}}", hint) else None


def team_key(*, workflow: str, policy_versions: Mapping[str, int], prompts_sha256: str, occasion: str = "") -> str:
    """Returns a name for what acts in an episode: workflow, prompts and one version per model group.

    `occasion` tells ad hoc episodes apart, in which the same task ids may mean other tasks, or the same tasks once more.
    """
    parts = [workflow, prompts_sha256, *(f"{g}={v}" for g, v in sorted(policy_versions.items()))]
    parts += [f"occasion={occasion}"] if occasion else []
    return sha256("\x1f".join(parts).encode()).hexdigest()[:16]
