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
from typing import Any

from stores.traces.conventions import VariantName
from stores.types import EpisodeRewards, Trace, Turn
from train_loops.advantages.rewarded_rows import CreditKind

TurnKey = tuple[str, int]
"""Episode id and turn index."""
Call = tuple[str, int]
"""An agent, and which of its own calls in the episode."""
Key = tuple[Any, ...]


def baselines_of(
    traces: Sequence[Trace], rewards: Mapping[str, EpisodeRewards], *, credit_kind: CreditKind
) -> dict[TurnKey, float]:
    """Returns (episode id, turn index) -> baseline, for the turns of episodes that are no variants and those of siblings.

    Args:
        traces: all of the iteration, variants included.
        rewards: by episode id; a variant without rewards (it failed) gives no baseline.
        credit_kind: what the credit rule declares its turn rewards to be.
    """
    played = [trace for trace in traces if not trace.variant]
    replayed, of_task, greedy = _earned_by_variants(traces, rewards, credit_kind=credit_kind)
    baselines: dict[TurnKey, float] = {}
    for trace in played:
        task_id, index = _place(trace)
        for turn in trace.turns:
            # The nearest replays count: of this turn, of its agent in this episode, of its agent in the task.
            own = ((task_id, index, turn.agent, turn.turn_index), (task_id, index, turn.agent, None))
            # A replay of this episode that replaced a later turn has this very one as it was: what it earned depends on this turn.
            others = [
                earned
                for at, changed, earned in of_task.get((task_id, turn.agent), ())
                if at != index or changed is None or changed <= turn.turn_index
            ]
            if earned := next((replayed[key] for key in own if key in replayed), others):
                baselines[trace.episode_id, turn.turn_index] = sum(earned) / len(earned)
            elif (task_id,) in greedy:
                baselines[trace.episode_id, turn.turn_index] = greedy.get((task_id, *_call(turn)), greedy[task_id,])
    return baselines | _sibling_baselines(traces, rewards)


def _earned_by_variants(
    traces: Sequence[Trace], rewards: Mapping[str, EpisodeRewards], *, credit_kind: CreditKind
) -> tuple[dict[Key, list[float]], dict[Key, list[tuple[int, int | None, float]]], dict[Key, float]]:
    """Returns what variants earned.

    Of replays by (task, episode index, agent, turn; None: the agent was left out), and by (task, agent) with episode index and turn; of
    greedy episodes by (task, *call), and by (task,) what stands against every other call.
    """
    bases = _by_place([trace for trace in traces if not trace.variant])
    replayed: dict[Key, list[float]] = defaultdict(list)
    of_task: dict[Key, list[tuple[int, int | None, float]]] = defaultdict(list)
    greedy: dict[Key, float] = {}
    for trace in traces:
        if not trace.variant or trace.episode_id not in rewards:
            continue
        name, (task_id, index) = VariantName.parse(trace.variant), _place(trace)
        outcome = rewards[trace.episode_id].outcome
        reward_of = {r.turn_index: r.reward for r in rewards[trace.episode_id].rewards}
        if name.kind == "greedy":
            greedy[task_id,] = outcome if credit_kind == "returns" else 0.0
            greedy |= {(task_id, *_call(t)): reward_of[t.turn_index] for t in trace.turns if t.turn_index in reward_of}
            continue
        agent, turn_index, earned = name.changed, None, outcome
        if name.kind == "counterfactual":
            turn_index = int(name.changed)
            base = bases.get((task_id, index))
            call = None if base is None else _call_of(base, turn_index)
            again = _same_call(trace, call)
            if call is None or again is None or again.turn_index not in reward_of:
                continue  # it never came to the replaced turn, or earned nothing there
            agent, earned = call[0], reward_of[again.turn_index]
        replayed[task_id, index, agent, turn_index].append(earned)
        of_task[task_id, agent].append((index, turn_index, earned))
    return replayed, of_task, greedy


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
                earned = [
                    x
                    for other in others
                    if (x := _earned_at(other, _call(turn), rewards, or_outcome=not is_counterfactual)) is not None
                ]
                if earned:
                    baselines[trace.episode_id, turn.turn_index] = sum(earned) / len(earned)
    return baselines


def _earned_at(trace: Trace, call: Call, rewards: Mapping[str, EpisodeRewards], *, or_outcome: bool) -> float | None:
    """Returns the reward of an episode's turn with this call; where it never came to it, None or (`or_outcome`) its outcome."""
    episode = rewards.get(trace.episode_id)
    if episode is None:
        return None
    turn = _same_call(trace, call)
    reward_of = {r.turn_index: r.reward for r in episode.rewards}
    if turn is None:
        return episode.outcome if or_outcome else None
    return reward_of.get(turn.turn_index)


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
