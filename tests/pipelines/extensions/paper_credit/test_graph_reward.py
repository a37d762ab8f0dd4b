"""The nodes of a declared graph earn by their parsers, and share the outcome (UnityMAS-O, arXiv 2605.26646)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from by_hand import paid, trace

from pipelines.config.sections import DottedConfig
from pipelines.credit.rule import _used, credit_version, load_credit
from pipelines.extensions.paper_credit import graph_reward
from pipelines.extensions.paper_credit.graph_reward import GraphReward
from stores.types import SERVED

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[4]
QA = [("decomposer", {}), ("answerer", {"_bad": "x"})]
QA_GRAPH = """\
nodes:
  decomposer: {type: model, prompt: "{question}", parser: {valid_reward: 0.5, invalid_reward: -0.5}}
  answerer: {type: model, prompt: "{decomposer.text}", parser: {tags: [answer]}}
edges: [{from: decomposer, to: answerer}]
start: [decomposer]
end: [answerer]
answer: "{answerer.answer}"
"""


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({}, {"decomposer_0": 1.5, "answerer_0": 0.0}),
        ({"share": "split", "outcome_weight": 2.0}, {"decomposer_0": 1.5, "answerer_0": 0.0}),
        ({"format_weight": 0.1, "sharing": ["answerer"]}, {"decomposer_0": 0.05, "answerer_0": 0.9}),
    ],
)
def test_a_graphs_nodes_earn_by_their_parsers(
    settings: dict[str, Any], rewards: dict[str, float], tmp_path: Path
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(QA_GRAPH)
    played = trace(QA, answers=("The Red Town!",), answer="red town")
    assert paid(GraphReward(str(path), **settings), played) == pytest.approx(rewards)
    with pytest.raises(ValueError, match="'nobody' is no node"):
        GraphReward(str(path), sharing=["nobody"])


def test_an_untrained_node_is_not_paid_and_another_file_is_another_rule(tmp_path: Path) -> None:
    text = (ROOT / "infra" / "graphs" / "rewrite_select.yaml").read_text()
    path = tmp_path / "graph.yaml"
    path.write_text(text.replace("    max_tokens: 64\n", "    max_tokens: 64\n    trainable: false\n"))
    rule = DottedConfig(
        path="pipelines.extensions.paper_credit.graph_reward:GraphReward", settings={"graph": str(path)}
    )
    played = trace([(name, {}) for name in ("rewriter", "selector", "answerer")], answer="55")
    assert paid(load_credit(rule), played) == {"rewriter_0": 1.0, "answerer_0": 1.0}
    served = replace(played, outcome_metadata={SERVED: {"score": 0.5}})
    assert paid(load_credit(rule), served) == {"rewriter_0": 0.75, "answerer_0": 0.75}
    before = credit_version(rule)
    path.write_text(text)
    assert credit_version(rule) != before
    with pytest.raises(ValueError, match=r"credit\.settings\.share: 'bogus'"):
        GraphReward(graph=str(path), share="bogus")  # type: ignore[arg-type]


def test_a_rule_is_named_by_all_functions_that_it_uses() -> None:
    assert {"serve_apps.tools.text_match", "serve_apps.tools.math_answer"} <= {m.__name__ for m in _used(graph_reward)}
