"""What canary and guards see of a workflow run: a run that failed counts as failed, whoever caused it."""

from __future__ import annotations

import pytest

from serve_apps.gateway.figures import Tally, run_figures

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("status", "is_failed"), [("ok", 0.0), ("truncated", 0.0), ("tool_error", 1.0), ("agent_error", 1.0)]
)
def test_a_run_that_the_policy_made_fail_is_a_failed_answer(status: str, is_failed: float) -> None:
    turns = [{"is_format_ok": True}] if status == "truncated" else []
    answer = {"status": status, "answer": "", "turns": turns, "usage": {"completion_tokens": 7}}
    figures = run_figures(answer)
    assert figures is not None and figures["failure_share"] == is_failed and figures["empty_share"] == 1.0
    tally = Tally()
    tally.add({"failure_share": 0.0, **figures, "latency_s": 0.5})
    assert tally.sums["failure_share"] == [1, is_failed, is_failed]


def test_a_task_that_does_not_fit_the_context_counts_for_no_team() -> None:
    answer = {"status": "truncated", "answer": "", "turns": [], "usage": {"completion_tokens": 0}}
    assert run_figures(answer) is None
