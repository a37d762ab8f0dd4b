"""graph_reward: trace -> rewards of the nodes of a declared graph (UnityMAS-O, arXiv 2605.26646).

R = `format_weight` * (the parser's `valid_reward` or `invalid_reward`)
  + `outcome_weight` * outcome, in full or split, for nodes that share it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pipelines.credit.outcome import check_share, outcome_metric
from pipelines.credit.rule import Credit, turn_reward
from serve_apps.extensions.graphs.graph import load_graph
from stores.settings import AgentName, NotNegative
from stores.types import Trace


class GraphReward:
    """Rewards the format by each node's own parser, and the outcome by the graph's answer."""

    kind: Literal["returns"] = "returns"

    def __init__(
        self,
        graph: str,
        metric: str = "em",
        share: Literal["full", "split"] = "full",
        format_weight: NotNegative = 1.0,
        outcome_weight: NotNegative = 1.0,
        sharing: Sequence[AgentName] = (),
    ) -> None:
        """Args:
        graph: YAML file, the one that the workflow runs.
        metric: em, f1 or math.
        share: `full`: each turn gets the whole outcome; `split`: it is divided by the number of sharing turns.
        sharing: nodes that share the outcome; empty: all model and choice nodes.
        """
        self.metric = outcome_metric(metric)
        check_share(share)
        nodes = load_graph(graph).nodes
        self.identity = Path(graph).read_text(encoding="utf-8")
        unknown = sorted(set(sharing) - nodes.keys())
        if unknown:
            raise ValueError(
                f"credit.settings.sharing: {unknown[0]!r} is no node of {graph}: {', '.join(sorted(nodes))}"
            )
        self.parsers = {name: node.parser for name, node in nodes.items() if node.is_agent}
        self.untrained = {name for name, node in nodes.items() if not node.trainable}
        self.share = share
        self.format_weight, self.outcome_weight, self.sharing = format_weight, outcome_weight, tuple(sharing)

    def assign_credit(self, trace: Trace) -> Credit:
        """Returns the credit; the outcome is the metric of `trace.answer`."""
        return self._credit(trace, self.metric(trace.answer, trace.task.answers))

    def assign_failed(self, trace: Trace) -> Credit:
        """Returns the credit of an episode whose failure the policy caused: outcome 0, and the format of each turn."""
        return self._credit(trace, 0.0)

    def pays(self, agent: str) -> bool:
        """Says whether the node `agent` is trainable."""
        return agent not in self.untrained

    def _credit(self, trace: Trace, outcome: float) -> Credit:
        paid = [self.shares(turn.agent) for turn in trace.turns]
        each = self.outcome_weight * (outcome / max(1, sum(paid)) if self.share == "split" else outcome)
        rewards = []
        for i, turn in enumerate(trace.turns):
            if not self.pays(turn.agent):
                continue
            parser = self.parsers[turn.agent]
            form = parser.valid_reward if turn.is_format_ok else parser.invalid_reward
            parts = {"outcome": each if paid[i] else 0.0, "format": self.format_weight * form}
            rewards.append(turn_reward(trace, i, parts))
        return Credit(outcome=outcome, rewards=tuple(rewards))

    def shares(self, agent: str) -> bool:
        """Says whether turns of the node `agent` get a share of the outcome."""
        return agent in self.sharing if self.sharing else self.pays(agent)
