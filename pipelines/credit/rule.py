"""rule: the interface of a credit rule, how one is loaded, and traces -> rewards under one version of it."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Literal, Protocol, runtime_checkable

from pipelines.config.sections import DottedConfig
from stores.by_name import construct, line_of
from stores.settings import AGENTS
from stores.types import SERVED, Cause, EpisodeRewards, Trace, Turn, TurnReward

CreditKind = Literal["returns", "increments"]
TROUPE = ("pipelines", "serve_apps")
"""Packages whose functions are part of what a rule does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The credit of one episode: its outcome and the rewards of its turns."""

    outcome: float
    """The episode's result; in [0, 1] for verifiable tasks."""
    rewards: tuple[TurnReward, ...]
    """At most one per turn. A turn without a reward does not train."""


class CreditRule(Protocol):
    """Assigns rewards to the turns of an episode. The constructor takes `credit.settings` of the run config.

    A rule that compares episodes also has `assign_all(traces) -> list[Credit]`. It gets all episodes that are scored
    together (those of an iteration), in any order, and its result must not depend on the order.

    A rule is not asked about an episode whose failure the policy caused: that gets the worst outcome, see `failed_credit`. A
    rule may say what that is by an attribute `worst_outcome` (default 0), or by a method `assign_failed(trace) -> Credit`.
    Without that method such an episode is paid at most the least of the rewards that it is compared with, see `capped`. A rule whose method
    cannot know what others earn has `caps_failed = True`, so that this goes for it, too.

    A rule under which some agents do not train says so by a method `pays(agent) -> bool`, so that their turns are not paid
    in episodes either that it is not asked about. A rule under which some agents train without a share of the outcome says so by a
    method `shares(agent) -> bool`; in those episodes such an agent earns 0.

    A rule that asks somebody else may say by a method `preflight() -> list[str]` who answers: `troupe validate` calls it, and shows its lines.

    A rule that compares answers with references may say by a method `reads(reference) -> bool` which it can read: `troupe validate` counts
    the others.
    """

    kind: CreditKind
    """`returns`: every reward is the return of the whole rest of the episode, and GAE (arXiv 1506.02438) ends at each turn.
    `increments`: the rewards of an episode add up to its return, and GAE chains through the turns."""

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit of one episode. It is a pure function of the trace, and rewards only turns of the trace."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PastEpisode:
    """An episode of an earlier iteration, and its outcome."""

    trace: Trace
    outcome: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """The rewards of an iteration, and how far they can be trusted."""

    rewards: list[EpisodeRewards]
    fidelity: float | None
    """How well the outcomes of unseen episodes are ordered, -1 to 1; None where all ended alike."""
    is_used: bool
    """False where chance orders them as well: the rewards are those of the inner rule."""


@runtime_checkable
class InferringRule(CreditRule, Protocol):
    """A credit rule whose rewards depend on earlier iterations, too; stage score calls `infer` after `assign_credit`."""

    past_iterations: int
    """How many iterations before this one it is given."""

    def infer(
        self, rewards: Sequence[EpisodeRewards], traces: Sequence[Trace], past: Sequence[PastEpisode]
    ) -> Inferred:
        """Returns the rewards of an iteration's episodes, whose own are `rewards`."""
        ...


def load_credit(config: DottedConfig, *, place: str = "credit", agents: Collection[str] = ()) -> CreditRule:
    """Returns the rule that a run config names. Raises ValueError if it cannot be imported, is no rule or refuses its settings.

    Args: agents: those of the run, among which the settings of the rule, and of one in it, may name some; empty: any.
    """
    if agents:
        context = copy_context()
        context.run(AGENTS.set, agents)
        return context.run(load_credit, config, place=place)
    rule: CreditRule = construct(
        config.path,
        config.settings,
        place=place,
        wanted="a credit rule: a class with assign_credit(trace)",
        fits=lambda cls: callable(cls) and callable(getattr(cls, "assign_credit", None)),
    )
    if getattr(rule, "kind", None) not in ("returns", "increments"):
        raise ValueError(f"{place}.path: {config.path!r} must declare kind = 'returns' or 'increments'")
    return rule


def credit_version(config: DottedConfig) -> str:
    """Returns a hash of what a rule does, by which its rewards are stored: a changed rule never finds those of the old one.

    It covers the path, the settings, the rule's `identity` if it has one (e.g. a file that it reads), the source of its
    module, and the source of every module that this one imports from its own package, and from Troupe for functions or base classes.
    """
    rule = load_credit(config)
    module = sys.modules[type(rule).__module__]
    parts = [config.path, json.dumps(config.settings, sort_keys=True, default=str), getattr(rule, "identity", "")]
    parts += [_source(used) for used in _used(module)]
    return sha256("\x1f".join(parts).encode()).hexdigest()[:16]


def _used(module: ModuleType) -> list[ModuleType]:
    """Returns `module` and, recursively, the modules that each of them uses."""
    packages = {*TROUPE, module.__name__.partition(".")[0]}
    modules, todo = {module.__name__: module}, [module]
    while todo:
        current = todo.pop()
        names = {name for name in _names_used(current) if name.partition(".")[0] in packages} - modules.keys()
        modules |= {name: sys.modules[name] for name in names}
        todo += [sys.modules[name] for name in names]
    return [modules[name] for name in sorted(modules)]


def _names_used(module: ModuleType) -> set[str]:
    """Returns the names of the modules that define the functions, classes and objects in `module`, and of the modules in it.

    Classes of Troupe count where one of the module's own inherits from them: the records that a rule reads change no reward.
    """
    names = set(re.findall(r"^import ([\w.]+)", _source(module), re.MULTILINE))
    for value in vars(module).values():
        value = inspect.unwrap(value) if callable(value) else value
        if inspect.ismodule(value) and not hasattr(module, "__path__"):  # a package holds whatever was imported of it
            names.add(value.__name__)
        elif inspect.isfunction(value):
            names.add(value.__module__)
        cls = value if inspect.isclass(value) else type(value)
        if cls.__module__ == module.__name__ or cls.__module__.partition(".")[0] not in TROUPE:
            names |= {base.__module__ for base in cls.__mro__}
    return names & sys.modules.keys()


def _source(module: ModuleType) -> str:
    file = module.__file__
    return Path(file).read_text() if file and file.endswith(".py") else module.__name__


def credits_of(rule: CreditRule, traces: Sequence[Trace]) -> list[Credit]:
    """Returns the credit of a set of episodes, in their order: of all at once if `rule` can, else of each by itself.

    Production episodes are not judged by the rule: their credit is the score that the caller gave (`caller_credit`). Nor are
    those whose failure the policy caused (`failed_credit`).
    """
    caller_scores = {trace.episode_id: score for trace in traces if (score := caller_score(trace)) is not None}
    failed = {trace.episode_id for trace in traces if trace.cause is Cause.POLICY} - caller_scores.keys()
    own = [trace for trace in traces if trace.episode_id not in caller_scores and trace.episode_id not in failed]
    assign_all = getattr(rule, "assign_all", None)
    if assign_all is None:
        judged = [credit_of(rule, trace) for trace in own]
    else:
        with _asked(rule, f"{len(own)} episodes"):
            judged = list(assign_all(own)) if own else []
    if len(judged) != len(own):
        raise ValueError(f"{type(rule).__name__} gives credit to {len(judged)} episodes of {len(own)}")
    own_credits = iter(judged)
    worst = [(trace, failed_credit(rule, trace)) for trace in traces if trace.episode_id in failed]
    if caps_failed(rule):
        failed_credits = iter(capped(worst, list(zip(own, judged, strict=True)), kind=rule.kind))
    else:
        failed_credits = iter([credit for _, credit in worst])
    return [
        caller_credit(rule, trace, caller_scores[trace.episode_id])
        if trace.episode_id in caller_scores
        else next(failed_credits)
        if trace.episode_id in failed
        else next(own_credits)
        for trace in traces
    ]


def credit_of(rule: CreditRule, trace: Trace) -> Credit:
    """Asks a rule about one episode; ValueError, with the line of the user's own code, where that raises."""
    with _asked(rule, f"episode {trace.episode_id}"):
        credit = rule.assign_credit(trace)
    if not isinstance(credit, Credit):
        raise ValueError(
            f"credit rule {type(rule).__name__} gives episode {trace.episode_id} {credit!r:.80}: return a Credit"
        )
    return credit


@contextmanager
def _asked(rule: CreditRule, what: str) -> Iterator[None]:
    try:
        yield
    except OSError:  # of a judge or a file that it asks
        raise
    except Exception as error:
        line = line_of(error)
        if isinstance(error, ValueError) and not line:  # one of Troupe's rules, which says what to do
            raise
        raise ValueError(
            f"credit rule {type(rule).__name__} fails on {what} ({type(error).__name__}: {error}{line}): it must give a credit whatever "
            "a model wrote"
        ) from error


def worst_outcome(rule: CreditRule) -> float:
    """Returns the outcome of an episode whose failure the policy caused."""
    return float(getattr(rule, "worst_outcome", 0.0))


def pays(rule: CreditRule, agent: str) -> bool:
    """Says whether turns of `agent` are paid, and so train."""
    says = getattr(rule, "pays", None)
    return says is None or bool(says(agent))


def shares(rule: CreditRule, agent: str) -> bool:
    """Says whether turns of `agent` get a share of the outcome."""
    says = getattr(rule, "shares", None)
    return says is None or bool(says(agent))


def preflight(rule: CreditRule) -> list[str]:
    """Returns what a rule says of whom it asks; empty where it asks nobody."""
    return list(getattr(rule, "preflight", list)())


def reads(rule: CreditRule, reference: str) -> bool:
    """Says whether a rule can read a reference."""
    says = getattr(rule, "reads", None)
    return says is None or bool(says(reference))


def caps_failed(rule: CreditRule) -> bool:
    """Says whether failing is paid at most the least that others earn: unless the rule itself says what a failure earns."""
    return bool(getattr(rule, "caps_failed", not hasattr(rule, "assign_failed")))


def capped(
    failed: Sequence[tuple[Trace, Credit]], judged: Sequence[tuple[Trace, Credit]], *, kind: CreditKind
) -> list[Credit]:
    """Returns the credit of failed episodes: a turn earns at most what its agent earns least in the judged ones that it is compared
    with, those of its group, or all where the group has none. Format penalties are apart.

    A worst outcome of 0 is more than a turn earns that loses what others had right. Of increments the last turn alone pays for
    the failure, and so much that their sum is at most the least sum.
    """
    credits = []
    for trace, credit in failed:
        of_group = [other for t, other in judged if t.group_id == trace.group_id]
        others = of_group or [other for _, other in judged]
        credits.append(_capped(credit, others, kind=kind))
    return credits


def _capped(credit: Credit, others: Sequence[Credit], *, kind: CreditKind) -> Credit:
    least: dict[str, float] = {}
    for reward in (reward for other in others for reward in other.rewards):
        least[reward.agent] = min(least.get(reward.agent, math.inf), _without_format(reward))
    if not least or not credit.rewards:
        return credit
    if kind == "returns":
        rewards = [_at_most(reward, least.get(reward.agent, math.inf)) for reward in credit.rewards]
        return replace(credit, rewards=tuple(rewards))
    *before, last = sorted(credit.rewards, key=lambda reward: reward.turn_index)
    least_sum = min(math.fsum(map(_without_format, other.rewards)) for other in others if other.rewards)
    most = least_sum - math.fsum(map(_without_format, before))
    return replace(credit, rewards=(*before, _at_most(last, min(most, least.get(last.agent, math.inf)))))


def _without_format(reward: TurnReward) -> float:
    return reward.reward - reward.breakdown.get("format", 0.0)


def _at_most(reward: TurnReward, most: float) -> TurnReward:
    over = _without_format(reward) - most
    if over <= 0:
        return reward
    parts = {**reward.breakdown, "failed": reward.breakdown.get("failed", 0.0) - over}
    return replace(reward, reward=reward.reward - over, breakdown=parts)


def failed_credit(rule: CreditRule, trace: Trace) -> Credit:
    """Returns the credit of an episode whose failure the policy caused: what the rule says, or else its worst outcome.

    Each turn that the rule `pays` gets the outcome, or the last one if `kind` is `increments`, whose rewards add up; and the
    rule's penalty `format_weight` where its format is invalid, so that to fail is never better than to be wrong.
    """
    assign_failed = getattr(rule, "assign_failed", None)
    if assign_failed is not None:
        with _asked(rule, f"episode {trace.episode_id}"):
            credit: Credit = assign_failed(trace)
        return credit
    outcome, weight = worst_outcome(rule), float(getattr(rule, "format_weight", 0.0))
    rewards = [
        turn_reward(trace, i, {"failed": earned, "format": format_penalty(trace.turns[i], weight)})
        for i, earned in by_position(rule, trace, outcome).items()
    ]
    return Credit(outcome=outcome, rewards=tuple(rewards))


def caller_score(trace: Trace) -> float | None:
    """Returns the caller's score of a production episode, -1 to 1; None for an episode that the run sampled."""
    score = trace.outcome_metadata.get(SERVED, {}).get("score")
    return None if score is None else float(score)


def caller_credit(rule: CreditRule, trace: Trace, score: float) -> Credit:
    """Returns the outcome (score + 1) / 2, in [0, 1], as the reward of each turn that shares it, or of the last one of those if `kind`
    is `increments`."""
    outcome = (score + 1) / 2
    rewards = [turn_reward(trace, i, {"caller": earned}) for i, earned in by_position(rule, trace, outcome).items()]
    return Credit(outcome=outcome, rewards=tuple(rewards))


def by_position(rule: CreditRule, trace: Trace, outcome: float) -> dict[int, float]:
    """Returns what the turns that the rule `pays` get of an outcome, by position: each that shares it all of it, or the last one of
    those for `increments`; the others 0."""
    paid = [i for i, turn in enumerate(trace.turns) if pays(rule, turn.agent)]
    sharing = [i for i in paid if shares(rule, trace.turns[i].agent)]
    if rule.kind == "increments":
        sharing = sorted(sharing, key=lambda i: trace.turns[i].turn_index)[-1:]
    return {i: outcome if i in sharing else 0.0 for i in paid}


def score_traces(rule: CreditRule, traces: Sequence[Trace], *, version: str) -> list[EpisodeRewards]:
    """Returns the rewards of episodes that are scored together under `rule`, whose `credit_version` is `version`.

    Raises ValueError for an episode that is no outcome of the policy, and for a rule that rewards a turn which is not in the
    trace, rewards one twice, or returns a number that is not finite.
    """
    for trace in traces:
        if not trace.is_outcome:
            raise ValueError(
                f"episode {trace.episode_id} is {trace.status}, caused by {trace.cause}: it is no outcome of the policy and "
                "is not scored; skip it"
            )
    credits = credits_of(rule, traces)
    return [
        _rewards(trace, credit, name=type(rule).__name__, version=version)
        for trace, credit in zip(traces, credits, strict=True)
    ]


def score_trace(rule: CreditRule, trace: Trace, *, version: str) -> EpisodeRewards:
    """Returns the rewards of one episode by itself, see `score_traces`."""
    return score_traces(rule, [trace], version=version)[0]


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
    """Returns the reward of `trace.turns[position]`: the sum of the named parts of `breakdown`."""
    turn = trace.turns[position]
    return TurnReward(
        turn_index=turn.turn_index,
        agent=turn.agent,
        model_group=turn.model_group,
        reward=sum(breakdown.values()),
        breakdown=breakdown,
    )


def format_penalty(turn: Turn, weight: float) -> float:
    """Returns 0 if the turn's format is valid, else -`weight`."""
    return 0.0 if turn.is_format_ok else -weight
