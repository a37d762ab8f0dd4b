"""rule: what a credit rule is, how one is loaded, and trace -> rewards under one version of it."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from pipelines.config.sections import DottedConfig
from serve_apps.workflow import load_object
from stores.types import SERVED, EpisodeRewards, EpisodeStatus, Trace, Turn, TurnReward

CreditKind = Literal["returns", "increments"]
SCORED_STATUSES = (EpisodeStatus.OK, EpisodeStatus.TRUNCATED)
"""What the policy did. Other episodes get no rewards at all, rather than zeros by accident (design rule 5), unless a
model group's `train_statuses` asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What a rule makes of one episode."""

    outcome: float
    """The episode's result; in [0, 1] for verifiable tasks."""
    rewards: tuple[TurnReward, ...]
    """At most one per turn; a turn without one earns nothing and does not train."""


class CreditRule(Protocol):
    """Gives credit to turns. Its constructor takes `credit.settings` of the run config.

    A rule that compares episodes has `assign_all(traces) -> list[Credit]` as well: it is given all that are scored
    together (those of an iteration), in any order, and must come to the same whatever the order.
    """

    kind: CreditKind
    """`returns`: every reward stands for the whole rest of the episode, GAE ends at each turn. `increments`: rewards
    of an episode add up to its return, GAE chains through them (design rule 9)."""

    def assign_credit(self, trace: Trace) -> Credit:
        """Pure: the same trace always earns the same. Pays only turns that are in the trace."""
        ...


def load_credit(config: DottedConfig, *, place: str = "credit") -> CreditRule:
    """The rule that a run config names; ValueError where it does not import, is none or refuses its settings."""
    cls = load_object(config.path, place=f"{place}.path")
    if not (callable(cls) and callable(getattr(cls, "assign_credit", None))):
        raise ValueError(
            f"{place}.path: {config.path!r} is no credit rule: a class with assign_credit(trace) is needed"
        )
    try:
        inspect.signature(cls).bind(**config.settings)
    except TypeError as error:
        raise ValueError(f"{place}.settings: {config.path} does not take them: {error}") from None
    rule = cls(**config.settings)
    if getattr(rule, "kind", None) not in ("returns", "increments"):
        raise ValueError(f"{place}.path: {config.path!r} must declare kind = 'returns' or 'increments'")
    return rule


def credit_version(config: DottedConfig) -> str:
    """Names a rule by what it does: path, settings, its `identity` if it has one (a file that it reads, say), the source of
    its module and of what that imports functions from or builds classes on, and so on, within the same package and Troupe's.

    Rewards are keyed by it, so that a changed rule never finds the rewards of the old one.
    """
    rule = load_credit(config)
    module = sys.modules[type(rule).__module__]
    parts = [config.path, json.dumps(config.settings, sort_keys=True, default=str), getattr(rule, "identity", "")]
    parts += [_source(one) for one in _used(module)]
    return sha256("\x1f".join(parts).encode()).hexdigest()[:16]


def _used(module: ModuleType) -> list[ModuleType]:
    """`module` and the modules whose functions it has imported by name, or whose classes its own inherit, and theirs."""
    packages = {"pipelines", "serve_apps", module.__name__.partition(".")[0]}
    found, todo = {module.__name__: module}, [module]
    while todo:
        one = todo.pop()
        used: list[Any] = [f for f in vars(one).values() if inspect.isfunction(f)]
        own = [c for c in vars(one).values() if inspect.isclass(c) and c.__module__ == one.__name__]
        used += [base for c in own for base in c.__mro__]
        names = {f.__module__ for f in used if f.__module__.partition(".")[0] in packages} - found.keys()
        found |= {name: sys.modules[name] for name in names}
        todo += [sys.modules[name] for name in names]
    return [found[name] for name in sorted(found)]


def _source(module: ModuleType) -> str:
    return Path(module.__file__).read_text() if module.__file__ else module.__name__


def credits_of(rule: CreditRule, traces: Sequence[Trace]) -> list[Credit]:
    """What `rule` makes of a set of episodes: of all at once where it can, else of each by itself.

    Episodes from service are not the rule's: their credit is the caller's word (`caller_credit`).
    """
    said = {trace.episode_id: score for trace in traces if (score := caller_score(trace)) is not None}
    own = [trace for trace in traces if trace.episode_id not in said]
    assign_all = getattr(rule, "assign_all", None)
    judged = list(assign_all(own)) if assign_all is not None else [rule.assign_credit(trace) for trace in own]
    if len(judged) != len(own):
        raise ValueError(f"{type(rule).__name__} gives credit to {len(judged)} episodes of {len(own)}")
    found = iter(judged)
    return [
        caller_credit(trace, said[trace.episode_id], kind=rule.kind) if trace.episode_id in said else next(found)
        for trace in traces
    ]


def caller_score(trace: Trace) -> float | None:
    """What a caller gave an episode from service, -1 to 1; None for what the run sampled itself."""
    score = trace.outcome_metadata.get(SERVED, {}).get("score")
    return None if score is None else float(score)


def caller_credit(trace: Trace, score: float, *, kind: CreditKind) -> Credit:
    """Outcome (score + 1) / 2, in [0, 1]: earned by every turn, or where rewards are increments by the last one."""
    outcome = (score + 1) / 2
    last = len(trace.turns) - 1
    rewards = [
        turn_reward(trace, i, {"caller": outcome if kind == "returns" or i == last else 0.0})
        for i in range(len(trace.turns))
    ]
    return Credit(outcome=outcome, rewards=tuple(rewards))


def score_traces(
    rule: CreditRule,
    traces: Sequence[Trace],
    *,
    version: str,
    statuses: tuple[EpisodeStatus, ...] = SCORED_STATUSES,
) -> list[EpisodeRewards]:
    """The rewards of episodes that are scored together, under `rule`, whose `credit_version` is `version`.

    Raises ValueError for an episode that is not scored (see `statuses`) and for a rule that pays a turn which did
    not happen, pays one twice, or pays what is not a finite number.
    """
    for trace in traces:
        if trace.status not in statuses:
            raise ValueError(
                f"episode {trace.episode_id} is {trace.status}: it is not scored (only {', '.join(statuses)} are); skip it"
            )
    credits = credits_of(rule, traces)
    return [
        _rewards(trace, credit, name=type(rule).__name__, version=version)
        for trace, credit in zip(traces, credits, strict=True)
    ]


def score_trace(
    rule: CreditRule,
    trace: Trace,
    *,
    version: str,
    statuses: tuple[EpisodeStatus, ...] = SCORED_STATUSES,
) -> EpisodeRewards:
    """`score_traces` of one episode by itself."""
    return score_traces(rule, [trace], version=version, statuses=statuses)[0]


def _rewards(trace: Trace, credit: Credit, *, name: str, version: str) -> EpisodeRewards:
    agents = {turn.turn_index: (turn.agent, turn.model_group) for turn in trace.turns}
    paid: set[int] = set()
    for reward in credit.rewards:
        if agents.get(reward.turn_index) != (reward.agent, reward.model_group):
            raise ValueError(f"{name} pays turn {reward.turn_index} of {reward.agent}: not in {trace.episode_id}")
        if reward.turn_index in paid:
            raise ValueError(f"{name} pays turn {reward.turn_index} of episode {trace.episode_id} twice")
        paid.add(reward.turn_index)
    if not all(math.isfinite(x) for x in (credit.outcome, *(r.reward for r in credit.rewards))):
        raise ValueError(f"{name} gives episode {trace.episode_id} what is not a finite number: {credit}")
    return EpisodeRewards(
        episode_id=trace.episode_id,
        run_id=trace.run_id,
        iteration=trace.iteration,
        purpose=trace.purpose,
        credit_version=version,
        outcome=credit.outcome,
        rewards=credit.rewards,
    )


def turn_reward(trace: Trace, position: int, breakdown: dict[str, float]) -> TurnReward:
    """The reward of `trace.turns[position]`: the sum of its parts."""
    turn = trace.turns[position]
    return TurnReward(
        turn_index=turn.turn_index,
        agent=turn.agent,
        model_group=turn.model_group,
        reward=sum(breakdown.values()),
        breakdown=breakdown,
    )


def format_penalty(turn: Turn, weight: float) -> float:
    """0 where the turn's format is ok, else -`weight`."""
    return 0.0 if turn.is_format_ok else -weight
