"""shaping: the rewards of another credit rule -> other rewards. Base class of the rules that take `inner: {path, settings}`.

The inner rule's rewards, without their `format` part, are the scores of the turns. A shaping replaces them;
the format part and the outcome do not change, and agents that it does not shape keep the rewards of the inner rule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.credit.rule import (
    Credit,
    CreditKind,
    by_position,
    credits_of,
    failed_credit,
    pays,
    preflight,
    reads,
    shares,
    turn_reward,
    worst_outcome,
)
from pipelines.extensions.paper_credit.inner import PLACE, load_inner
from pipelines.extensions.paper_credit.rounds import Rounds
from stores.settings import AgentName
from stores.traces.conventions import rounds_in_time
from stores.types import Trace, Turn, TurnReward


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The scores of an episode, as a shaping reads them."""

    rounds: Rounds
    """Scores of the agents that are shaped; a turn without a reward of the inner rule has none."""
    round_of: Mapping[int, int]
    """Round of each of their turns, by turn index."""
    elsewhere: Mapping[str, float]
    """Mean score of each agent that has one in the other episodes of the scored set."""


class Shaping(ABC):
    """A credit rule that changes the rewards of another one."""

    kind: CreditKind
    needs_scores = True
    """Whether the inner rule's rewards must be scores: differences between turns (increments) are none."""
    caps_failed = True
    """A failed episode is paid by the inner rule, which does not know how low a turn can be shaped."""

    def __init__(self, inner: Mapping[str, Any], agents: Sequence[AgentName] = ()) -> None:
        """Args:
        inner: the credit rule that scores the turns, as `{path, settings}`.
        agents: whose turns are shaped, in order; empty: all. The others keep the rewards of the inner rule.
        """
        self.inner, self.identity = load_inner(inner)
        self.agents = tuple(agents)
        if self.needs_scores and self.inner.kind == "increments":
            raise ValueError(
                f"{PLACE}: {inner['path']} pays increments, but {type(self).__name__} needs a score per turn that stands "
                "for itself: give a rule of kind `returns`, e.g. pipelines.extensions.paper_credit.debate:DebateReward"
            )

    @property
    def worst_outcome(self) -> float:
        """That of the inner rule: shaping does not change outcomes."""
        return worst_outcome(self.inner)

    @abstractmethod
    def parts(self, turn: Turn, played: Played) -> dict[str, float]:
        """Returns the named parts of the reward of a turn that has a score."""

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit of one episode by itself, without others to compare it with."""
        return self.assign_all([trace])[0]

    def assign_all(self, traces: Sequence[Trace]) -> list[Credit]:
        """Returns the credit of a set of episodes; it does not depend on their order."""
        credits = credits_of(self.inner, traces)
        round_of = [rounds_in_time([turn for turn in trace.turns if self.takes(turn.agent)]) for trace in traces]
        rounds = [self._rounds(t, credit, of) for t, credit, of in zip(traces, credits, round_of, strict=True)]
        counted = [not trace.variant for trace in traces]
        elsewhere = _means_elsewhere(rounds, counted)
        return [
            self._shaped(trace, credit, Played(rounds=r, round_of=of, elsewhere=e))
            for trace, credit, r, of, e in zip(traces, credits, rounds, round_of, elsewhere, strict=True)
        ]

    def assign_failed(self, trace: Trace) -> Credit:
        """Returns the credit of an episode whose failure the policy caused: that of the inner rule, unshaped.

        Where that is of another kind, its outcome is paid by the kind of this rule.
        """
        credit = failed_credit(self.inner, trace)
        if self.inner.kind == self.kind:
            return credit
        earned = by_position(self, trace, credit.outcome)
        penalties = {r.turn_index: r.breakdown.get("format", 0.0) for r in credit.rewards}
        rewards = [
            turn_reward(trace, i, {"failed": value, "format": penalties.get(trace.turns[i].turn_index, 0.0)})
            for i, value in earned.items()
        ]
        return Credit(outcome=credit.outcome, rewards=tuple(rewards))

    def pays(self, agent: str) -> bool:
        """Says whether the inner rule pays `agent`."""
        return pays(self.inner, agent)

    def shares(self, agent: str) -> bool:
        """Says whether `agent` shares the outcome of the inner rule."""
        return shares(self.inner, agent)

    def preflight(self) -> list[str]:
        """Returns what the inner rule says of whom it asks."""
        return preflight(self.inner)

    def reads(self, reference: str) -> bool:
        """Says whether the inner rule can read a reference."""
        return reads(self.inner, reference)

    def takes(self, agent: str) -> bool:
        """Says whether the turns of `agent` are shaped."""
        return not self.agents or agent in self.agents

    def _rounds(self, trace: Trace, credit: Credit, round_of: Mapping[int, int]) -> list[dict[str, float]]:
        agent_of = {turn.turn_index: turn.agent for turn in trace.turns}
        paid = [reward for reward in credit.rewards if reward.turn_index in round_of]
        rounds: list[dict[str, float]] = [{} for _ in range(max((round_of[r.turn_index] + 1 for r in paid), default=0))]
        for reward in paid:
            score = reward.reward - reward.breakdown.get("format", 0.0)
            rounds[round_of[reward.turn_index]][agent_of[reward.turn_index]] = score
        return rounds

    def _shaped(self, trace: Trace, credit: Credit, played: Played) -> Credit:
        turns = {turn.turn_index: turn for turn in trace.turns}
        rewards = []
        for reward in credit.rewards:
            turn = turns[reward.turn_index]
            if not self.takes(turn.agent):
                rewards.append(reward)
                continue
            parts = self.parts(turn, played)
            parts |= {"format": reward.breakdown["format"]} if "format" in reward.breakdown else {}
            rewards.append(_reward(turn, parts))
        return Credit(outcome=credit.outcome, rewards=tuple(rewards))


def _reward(turn: Turn, parts: Mapping[str, float]) -> TurnReward:
    return TurnReward(
        turn_index=turn.turn_index,
        agent=turn.agent,
        model_group=turn.model_group,
        reward=sum(parts.values()),
        breakdown=parts,
    )


def _means_elsewhere(episodes: Sequence[Rounds], counted: Sequence[bool]) -> list[dict[str, float]]:
    """Returns, per episode, each agent's mean score in the other counted episodes. Sums are exact, so order does not matter."""
    scores: dict[str, list[float]] = {}
    for rounds, counts in zip(episodes, counted, strict=True):
        for of_round in rounds if counts else ():
            for agent, score in of_round.items():
                scores.setdefault(agent, []).append(score)
    totals = {agent: math.fsum(values) for agent, values in scores.items()}
    means_by_episode = []
    for rounds, counts in zip(episodes, counted, strict=True):
        means = {}
        for agent, total in totals.items():
            own = [of_round[agent] for of_round in rounds if agent in of_round] if counts else []
            left = len(scores[agent]) - len(own)
            if left:
                means[agent] = (total - math.fsum(own)) / left
        means_by_episode.append(means)
    return means_by_episode
