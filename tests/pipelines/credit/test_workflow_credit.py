"""The reference workflows earn the credits of UnityMAS-O (arXiv 2605.26646), Dr. MAS (2602.08847) and UMAD (2603.01221)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.sections import DottedConfig
from pipelines.credit.graph_reward import GraphReward
from pipelines.credit.math_progress import MathProgress
from pipelines.credit.outcome import OutcomeShare
from pipelines.credit.rule import CreditRule, _used, credit_version, load_credit, score_trace
from stores.types import SERVED, EpisodeStatus, FinishReason, Purpose, Sampling, Task, ToolCall, Trace, Turn

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[3]
Event = tuple[str, dict[str, Any]]
"""(agent, fields) with `_bad` for a broken format, or ("verify", response)."""


def trace(events: Sequence[Event], *, answers: Sequence[str] = ("55",), answer: str = "") -> Trace:
    turns, calls, rounds = [], [], dict[str, int]()
    for index, (name, given) in enumerate(events):
        if name == "verify":
            error = given.get("error", "")
            calls.append(
                ToolCall(
                    call_index=index,
                    tool=name,
                    caller="",
                    parents=(),
                    request={},
                    response=None if error else given,
                    error=error,
                    start_s=0.0,
                    duration_s=0.0,
                )
            )
            continue
        rounds[name] = rounds.get(name, -1) + 1
        fault = given.get("_bad", "")
        turns.append(
            Turn(
                turn_index=index,
                agent=name,
                model_group="all",
                policy_version=0,
                round_index=rounds[name],
                parents=(),
                prompt_text="p",
                completion_text="c",
                prompt_token_ids=(1,),
                completion_token_ids=(2,),
                rollout_logprobs=(-0.5,),
                sampling=Sampling(max_tokens=8),
                seed=0,
                finish_reason=FinishReason.STOP,
                is_format_ok=not fault,
                format_fault=fault,
                fields={k: v for k, v in given.items() if k != "_bad"},
                start_s=0.0,
                duration_s=0.1,
            )
        )
    return Trace(
        episode_id="e" * 32,
        run_id="r",
        iteration=1,
        purpose=Purpose.TRAIN,
        team_key="k",
        workflow="w",
        task=Task(task_id="t", prompt="q", answers=tuple(answers)),
        group_id="g",
        episode_index=0,
        variant="",
        seed=0,
        status=EpisodeStatus.OK,
        stop_reason="finished",
        error="",
        answer=answer,
        outcome_metadata={},
        policy_versions={"all": 0},
        is_version_mixed=False,
        turns=tuple(turns),
        tool_calls=tuple(calls),
        started_at=0.0,
        duration_s=1.0,
        attempt=1,
    )


def paid(rule: CreditRule, played: Trace) -> dict[str, float]:
    """Reward by `agent_round`."""
    rounds = {t.turn_index: f"{t.agent}_{t.round_index}" for t in played.turns}
    return {rounds[r.turn_index]: r.reward for r in score_trace(rule, played, version="v").rewards}


def verdict(rate: float) -> Event:
    return ("verify", {"pass_rate": rate})


def answered(text: str) -> Event:
    return ("answerer", {"final_answer": text})


def searched(text: str = "q") -> list[Event]:
    return [("searcher", {"choice": "search", "search": text}), ("summarizer", {}), ("updater", {})]


END: Event = ("searcher", {"choice": "end", "search": ""})
TOWN = ("red town",)


QA = [("decomposer", {}), ("answerer", {"_bad": "x"})]


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({"metric": "em"}, {"decomposer_0": 1.0, "answerer_0": 0.0}),
        ({"metric": "em", "share": "split"}, {"decomposer_0": 0.5, "answerer_0": -0.5}),
        ({"metric": "em", "format_weight": 0.1}, {"decomposer_0": 1.0, "answerer_0": 0.9}),
        ({"metric": "em", "sharing": ["answerer"]}, {"decomposer_0": 0.0, "answerer_0": 0.0}),
        (
            {"metric": "em", "share": "split", "sharing": ["answerer"], "format_weight": 0},
            {"decomposer_0": 0.0, "answerer_0": 1.0},
        ),
    ],
)
def test_outcome_is_shared_in_full_or_split(settings: dict[str, Any], rewards: dict[str, float]) -> None:
    assert paid(OutcomeShare(**settings), trace(QA, answers=("The Red Town!",), answer="red town")) == rewards


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


def debated(*rounds: Sequence[str]) -> list[Event]:
    return [(f"debater_{i}", {"answer": answer}) for said in rounds for i, answer in enumerate(said)]


def test_an_untrained_node_is_not_paid_and_another_file_is_another_rule(tmp_path: Path) -> None:
    text = (ROOT / "infra" / "graphs" / "rewrite_select.yaml").read_text()
    path = tmp_path / "graph.yaml"
    path.write_text(text.replace("    max_tokens: 64\n", "    max_tokens: 64\n    trainable: false\n"))
    rule = DottedConfig(path="pipelines.credit.graph_reward:GraphReward", settings={"graph": str(path)})
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
    from pipelines.credit import graph_reward

    assert {"serve_apps.tools.text_match", "serve_apps.tools.math_answer"} <= {m.__name__ for m in _used(graph_reward)}


def test_progress_follows_time_and_not_the_order_in_which_turns_are_stored() -> None:
    episode = trace([("solver", {"answer": "55"}), ("refiner", {"answer": "1"})], answer="1")
    stored = replace(episode, turns=tuple(reversed(episode.turns)))
    assert paid(MathProgress(), stored) == paid(MathProgress(), episode) == {"solver_0": 1.0, "refiner_0": -1.0}
