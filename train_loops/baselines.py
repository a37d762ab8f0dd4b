"""baselines: variants of episodes and what they earned -> what each turn that trains is held against.

greedy           the same agent's turn of the same round in the task's greedy episode; where it was not called as often there,
                 that episode's outcome (of increments: nothing)
counterfactual   the turn in whose place another was sampled; for other turns of the agent the task's mean over them
without          the outcome without the agent; for other episodes the task's mean over them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stores.types import EpisodeRewards, Trace
from train_loops.advantages.rewarded_rows import CreditKind

TurnKey = tuple[str, int]


def baselines_of(
    traces: Sequence[Trace], rewards: Mapping[str, EpisodeRewards], *, credit_kind: CreditKind
) -> dict[TurnKey, float]:
    """(episode id, turn index) -> baseline, for the turns of episodes that are no variants.

    Args:
        traces: all of the iteration, variants among them.
        rewards: by episode id; a variant that is not paid (it failed) is no baseline.
        credit_kind: what the credit rule declares its turn rewards to be.
    """
    call_of = {
        (trace.task.task_id, trace.episode_index, turn.turn_index): (turn.agent, turn.round_index)
        for trace in traces
        if not trace.variant
        for turn in trace.turns
    }
    exact: dict[tuple[str, int, str, int], list[float]] = {}
    per_agent: dict[tuple[str, str], list[float]] = {}
    greedy: dict[tuple[str, str, int], float] = {}
    outcomes: dict[str, float] = {}
    for trace in traces:
        paid = rewards.get(trace.episode_id)
        if not trace.variant or paid is None:
            continue
        kind, _, what = trace.variant.partition("-")
        task, index = trace.task.task_id, trace.episode_index
        earned = {r.turn_index: r.reward for r in paid.rewards}
        if kind == "greedy":
            outcomes[task] = paid.outcome if credit_kind == "returns" else 0.0
            for turn in trace.turns:
                if turn.turn_index in earned:
                    greedy[task, turn.agent, turn.round_index] = earned[turn.turn_index]
            continue
        agent, value = what, paid.outcome
        if kind == "counterfactual":  # branches side by side: the same call may have another place in the replay
            call = call_of.get((task, index, int(what)))
            again = [t.turn_index for t in trace.turns if (t.agent, t.round_index) == call]
            if call is None or not again or again[0] not in earned:
                continue
            agent, value = call[0], earned[again[0]]
        per_agent.setdefault((task, agent), []).append(value)
        place = int(what) if kind == "counterfactual" else -1
        exact.setdefault((task, index, agent, place), []).append(value)
    found: dict[TurnKey, float] = {}
    for trace in traces:
        for turn in trace.turns if not trace.variant else ():
            task, agent = trace.task.task_id, turn.agent
            own = exact.get((task, trace.episode_index, agent, turn.turn_index)) or exact.get(
                (task, trace.episode_index, agent, -1)
            )
            values = own or per_agent.get((task, agent))
            if values:
                found[trace.episode_id, turn.turn_index] = sum(values) / len(values)
            elif task in outcomes:
                found[trace.episode_id, turn.turn_index] = greedy.get((task, agent, turn.round_index), outcomes[task])
    return found
