"""baselines: variants of episodes and what they earned -> what the reward of each turn that trains is compared with.

greedy           the same agent's turn of the same round in the task's greedy episode; where it was called less often
                 there, that episode's outcome (of increments: 0)
counterfactual   the turn in whose place another was sampled; for other turns of the agent the task's mean over them
without          the outcome without the agent; for other episodes the task's mean over them
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    """Returns (episode id, turn index) -> baseline, for the turns of episodes that are no variants.

    Args:
        traces: all of the iteration, variants included.
        rewards: by episode id; a variant without rewards (it failed) gives no baseline.
        credit_kind: what the credit rule declares its turn rewards to be.
    """
    variants = _Variants()
    played = [trace for trace in traces if not trace.variant]
    call_of = {
        (trace.task.task_id, trace.episode_index, turn.turn_index): (turn.agent, turn.round_index)
        for trace in played
        for turn in trace.turns
    }
    for trace in traces:
        if trace.variant and trace.episode_id in rewards:
            variants.add(_variant(trace, rewards[trace.episode_id], call_of, credit_kind=credit_kind))
    baselines = {(t.episode_id, turn.turn_index): variants.baseline(t, turn) for t in played for turn in t.turns}
    return {key: baseline for key, baseline in baselines.items() if baseline is not None}


def _variant(
    trace: Trace,
    rewards: EpisodeRewards,
    call_of: Mapping[tuple[str, int, int], Call],
    *,
    credit_kind: CreditKind,
) -> Variant | None:
    """Reads `greedy`, `counterfactual-<turn>` or `without-<agent>`; None where the replaced turn earned nothing."""
    kind, _, replaced = trace.variant.partition("-")
    task_id, episode_index = trace.task.task_id, trace.episode_index
    reward_of = {r.turn_index: r.reward for r in rewards.rewards}
    agent, turn_index, earned = replaced, None, rewards.outcome
    earned_by_call: dict[Call, float] = {}
    if kind == "greedy":
        agent, earned = "", rewards.outcome if credit_kind == "returns" else 0.0
        earned_by_call = {
            (t.agent, t.round_index): reward_of[t.turn_index] for t in trace.turns if t.turn_index in reward_of
        }
    elif kind == "counterfactual":
        turn_index = int(replaced)
        call = call_of.get((task_id, episode_index, turn_index))
        # The turn is found by its call: branches that run side by side may end in another order in the replay, and then
        # the same call has another turn index.
        replayed = next((t.turn_index for t in trace.turns if (t.agent, t.round_index) == call), None)
        if call is None or replayed not in reward_of:
            return None
        agent, earned = call[0], reward_of[replayed]
    return Variant(
        task_id=task_id,
        episode_index=episode_index,
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
