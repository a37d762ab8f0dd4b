"""baselines: variants of episodes and what they earned -> what the reward of each turn that trains is compared with.

greedy           the same agent's turn of the same round in the task's greedy episode; where it was called less often
                 there, that episode's outcome (of increments: 0)
counterfactual   the turns in whose place others were sampled; for other turns of the agent the task's mean over them
without          the outcomes without the agent; for other episodes the task's mean over them

Siblings are replays of one episode with one change. They train, too, where they have something to be compared with that saw
the same (C3, arXiv 2603.06859): of counterfactual ones the turn that was sampled anew, held against the replaced turn and
the other siblings' (leave one out); of those without an agent the turns after its silence, held against the same calls of
the other siblings. The replaced episode is nothing to compare these with: there the agent spoke.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stores.traces.conventions import VariantName
from stores.types import EpisodeRewards, Trace, Turn
from train_loops.advantages.rewarded_rows import CreditKind

TurnKey = tuple[str, int]
"""Episode id and turn index."""
Call = tuple[str, int]
"""An agent, and which of its own calls in the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A replay of an episode in which something was replaced, and what it earned."""

    task_id: str
    episode_index: int
    agent: str
    """Whose contribution was replaced or left out; empty for a greedy episode, in which everybody's was."""
    turn_index: int | None
    """The turn of the episode that was sampled anew; None where all turns of the agent were left out."""
    earned: float
    """The reward of the turn that was sampled anew, else the outcome (of a greedy episode's increments: 0)."""
    earned_by_call: Mapping[Call, float] = field(default_factory=dict)
    """The rewards of a greedy episode's turns."""


def baselines_of(
    traces: Sequence[Trace], rewards: Mapping[str, EpisodeRewards], *, credit_kind: CreditKind
) -> dict[TurnKey, float]:
    """Returns (episode id, turn index) -> baseline, for the turns of episodes that are no variants and those of siblings.

    Args:
        traces: all of the iteration, variants included.
        rewards: by episode id; a variant without rewards (it failed) gives no baseline.
        credit_kind: what the credit rule declares its turn rewards to be.
    """
    variants = _Variants()
    played = [trace for trace in traces if not trace.variant]
    bases = _by_place(played)
    for trace in traces:
        if trace.variant and trace.episode_id in rewards:
            variants.add(_variant(trace, rewards[trace.episode_id], bases, credit_kind=credit_kind))
    baselines = {(t.episode_id, turn.turn_index): variants.baseline(t, turn) for t in played for turn in t.turns}
    known = {key: baseline for key, baseline in baselines.items() if baseline is not None}
    return known | _sibling_baselines(traces, rewards)


def sibling_turns(traces: Sequence[Trace]) -> dict[str, frozenset[int]]:
    """Returns, by the id of each variant that has something to be compared with, the indices of its turns that train.

    Args:
        traces: all of the iteration, variants included.
    """
    found = {}
    for base, siblings in _families(traces):
        for trace in siblings:
            if turns := _own_turns(trace, base, has_others=len(siblings) > 1):
                found[trace.episode_id] = frozenset(turn.turn_index for turn in turns)
    return found


def _families(traces: Sequence[Trace]) -> list[tuple[Trace, list[Trace]]]:
    """Returns episodes with their replays that have one and the same change."""
    bases = _by_place([trace for trace in traces if not trace.variant])
    families: dict[tuple[str, int, str, str], list[Trace]] = defaultdict(list)
    for trace in traces:
        name = VariantName.parse(trace.variant)
        if name.changed and _place(trace) in bases:
            families[(*_place(trace), name.kind, name.changed)].append(trace)
    return [(bases[key[:2]], siblings) for key, siblings in families.items()]


def _own_turns(trace: Trace, base: Trace, *, has_others: bool) -> list[Turn]:
    """Returns the turns of a replay that were sampled in it and have something to be compared with."""
    name = VariantName.parse(trace.variant)
    if name.kind == "counterfactual":
        replayed = _same_call(trace, _call_of(base, int(name.changed)))
        return [] if replayed is None else [replayed]
    if not has_others:
        return []
    changed_at = min((turn.turn_index for turn in base.turns if turn.agent == name.changed), default=0)
    recorded = {_call(turn) for turn in base.turns if turn.turn_index < changed_at}
    return [turn for turn in trace.turns if turn.agent != name.changed and _call(turn) not in recorded]


def _sibling_baselines(traces: Sequence[Trace], rewards: Mapping[str, EpisodeRewards]) -> dict[TurnKey, float]:
    baselines: dict[TurnKey, float] = {}
    for base, siblings in _families(traces):
        has_others = len(siblings) > 1
        for trace in siblings:
            for turn in _own_turns(trace, base, has_others=has_others):
                is_counterfactual = VariantName.parse(trace.variant).kind == "counterfactual"
                others = [t for t in (*([base] * is_counterfactual), *siblings) if t is not trace]
                earned = [x for other in others if (x := _earned_at(other, _call(turn), rewards)) is not None]
                if earned:
                    baselines[trace.episode_id, turn.turn_index] = sum(earned) / len(earned)
    return baselines


def _earned_at(trace: Trace, call: Call, rewards: Mapping[str, EpisodeRewards]) -> float | None:
    """Returns the reward of an episode's turn with this call, or its outcome where it has none; None without rewards."""
    episode = rewards.get(trace.episode_id)
    if episode is None:
        return None
    turn = _same_call(trace, call)
    reward_of = {r.turn_index: r.reward for r in episode.rewards}
    return episode.outcome if turn is None else reward_of.get(turn.turn_index)


def _by_place(traces: Sequence[Trace]) -> dict[tuple[str, int], Trace]:
    return {_place(trace): trace for trace in traces}


def _place(trace: Trace) -> tuple[str, int]:
    """Returns what an episode and its replays have in common."""
    return trace.task.task_id, trace.episode_index


def _call(turn: Turn) -> Call:
    return turn.agent, turn.round_index


def _call_of(trace: Trace, turn_index: int) -> Call | None:
    return next((_call(turn) for turn in trace.turns if turn.turn_index == turn_index), None)


def _same_call(trace: Trace, call: Call | None) -> Turn | None:
    """Finds a turn by its call: branches that run side by side may end in another order in a replay, and then the same
    call has another turn index."""
    return next((turn for turn in trace.turns if _call(turn) == call), None)


def _variant(
    trace: Trace,
    rewards: EpisodeRewards,
    bases: Mapping[tuple[str, int], Trace],
    *,
    credit_kind: CreditKind,
) -> Variant | None:
    """Reads what was changed from the variant's name; None where the replaced turn earned nothing."""
    name = VariantName.parse(trace.variant)
    reward_of = {r.turn_index: r.reward for r in rewards.rewards}
    agent, turn_index, earned = name.changed, None, rewards.outcome
    earned_by_call: dict[Call, float] = {}
    if name.kind == "greedy":
        agent, earned = "", rewards.outcome if credit_kind == "returns" else 0.0
        earned_by_call = {_call(t): reward_of[t.turn_index] for t in trace.turns if t.turn_index in reward_of}
    elif name.kind == "counterfactual":
        turn_index = int(name.changed)
        base = bases.get(_place(trace))
        call = None if base is None else _call_of(base, turn_index)
        replayed = _same_call(trace, call)
        if call is None or replayed is None or replayed.turn_index not in reward_of:
            return None
        agent, earned = call[0], reward_of[replayed.turn_index]
    return Variant(
        task_id=trace.task.task_id,
        episode_index=trace.episode_index,
        agent=agent,
        turn_index=turn_index,
        earned=earned,
        earned_by_call=earned_by_call,
    )


class _Variants:
    """The variants of an iteration, by what they are a baseline of."""

    def __init__(self) -> None:
        self._of_turn: dict[tuple[str, int, str, int | None], list[float]] = defaultdict(list)
        """By task, episode index, agent and turn index (None: the agent was left out)."""
        self._of_agent: dict[tuple[str, str], list[float]] = defaultdict(list)
        """By task and agent."""
        self._greedy: dict[str, Variant] = {}
        """By task; one per task is played."""
        self._greedy_calls: dict[tuple[str, Call], float] = {}

    def add(self, variant: Variant | None) -> None:
        """Takes a variant; None is ignored."""
        if variant is None:
            return
        if not variant.agent:
            self._greedy[variant.task_id] = variant
            self._greedy_calls |= {(variant.task_id, call): x for call, x in variant.earned_by_call.items()}
            return
        key = (variant.task_id, variant.episode_index, variant.agent, variant.turn_index)
        self._of_turn[key].append(variant.earned)
        self._of_agent[variant.task_id, variant.agent].append(variant.earned)

    def baseline(self, trace: Trace, turn: Turn) -> float | None:
        """Returns the mean of the nearest variants: of this turn, of its agent in this episode, of its agent in the task.

        Without any it is the greedy episode's reward, and None where there was none either.
        """
        task_id, episode_index = trace.task.task_id, trace.episode_index
        earned = (
            self._of_turn.get((task_id, episode_index, turn.agent, turn.turn_index))
            or self._of_turn.get((task_id, episode_index, turn.agent, None))
            or self._of_agent.get((task_id, turn.agent))
        )
        if earned:
            return sum(earned) / len(earned)
        greedy = self._greedy.get(task_id)
        if greedy is None:
            return None
        return self._greedy_calls.get((task_id, (turn.agent, turn.round_index)), greedy.earned)
