"""rule: what a credit rule is, how one is loaded, and trace -> rewards under one version of it."""

from __future__ import annotations

import inspect
import json
import math
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol

from pipelines.sections import DottedConfig
from serve_apps.workflow import load_object
from stores.types import EpisodeRewards, EpisodeStatus, Trace, Turn, TurnReward

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
    """Gives credit to turns. Its constructor takes `credit.settings` of the run config."""

    kind: CreditKind
    """`returns`: every reward stands for the whole rest of the episode, GAE ends at each turn. `increments`: rewards
    of an episode add up to its return, GAE chains through them (design rule 9)."""

    def assign_credit(self, trace: Trace) -> Credit:
        """Pure: the same trace always earns the same. Pays only turns that are in the trace."""
        ...


def load_credit(config: DottedConfig) -> CreditRule:
    """The rule that a run config names; ValueError where it does not import, is none or refuses its settings."""
    cls = load_object(config.path, place="credit.path")
    if not (callable(cls) and callable(getattr(cls, "assign_credit", None))):
        raise ValueError(f"credit.path: {config.path!r} is no credit rule: a class with assign_credit(trace) is needed")
    try:
        inspect.signature(cls).bind(**config.settings)
    except TypeError as error:
        raise ValueError(f"credit.settings: {config.path} does not take them: {error}") from None
    rule = cls(**config.settings)
    if getattr(rule, "kind", None) not in ("returns", "increments"):
        raise ValueError(f"credit.path: {config.path!r} must declare kind = 'returns' or 'increments'")
    return rule


def credit_version(config: DottedConfig) -> str:
    """Names a rule by what it does: path, settings, its `identity` if it has one (a file that it reads, say), the source of
    its module and of what that imports functions from, and so on, within the same package and Troupe's.

    Rewards are keyed by it, so that a changed rule never finds the rewards of the old one.
    """
    rule = load_credit(config)
    module = sys.modules[type(rule).__module__]
    parts = [config.path, json.dumps(config.settings, sort_keys=True, default=str), getattr(rule, "identity", "")]
    parts += [_source(one) for one in _used(module)]
    return sha256("\x1f".join(parts).encode()).hexdigest()[:16]


def _used(module: ModuleType) -> list[ModuleType]:
    """`module` and the modules whose functions it has imported by name, and theirs."""
    packages = {"pipelines", "serve_apps", module.__name__.partition(".")[0]}
    found, todo = {module.__name__: module}, [module]
    while todo:
        functions = [f for f in vars(todo.pop()).values() if inspect.isfunction(f)]
        names = {f.__module__ for f in functions if f.__module__.partition(".")[0] in packages} - found.keys()
        found |= {name: sys.modules[name] for name in names}
        todo += [sys.modules[name] for name in names]
    return [found[name] for name in sorted(found)]


def _source(module: ModuleType) -> str:
    return Path(module.__file__).read_text() if module.__file__ else module.__name__


def score_trace(
    rule: CreditRule,
    trace: Trace,
    *,
    version: str,
    statuses: tuple[EpisodeStatus, ...] = SCORED_STATUSES,
) -> EpisodeRewards:
    """The trace's rewards under `rule`, whose `credit_version` is `version`.

    Raises ValueError for an episode that is not scored (see `statuses`) and for a rule that pays a turn which did
    not happen, pays one twice, or pays what is not a finite number.
    """
    if trace.status not in statuses:
        raise ValueError(
            f"episode {trace.episode_id} is {trace.status}: it is not scored (only {', '.join(statuses)} are); skip it"
        )
    credit = rule.assign_credit(trace)
    name = type(rule).__name__
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
