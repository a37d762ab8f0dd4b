"""What canary and guards see of a workflow run: it failed where a model made it fail, and says nothing where the task did."""

from __future__ import annotations

from typing import Any

import pytest

from serve_apps.gateway.traffic.figures import Tally, run_figures
from stores.types import Cause

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("status", "is_failed"), [("ok", 0.0), ("truncated", 0.0), ("tool_error", 1.0), ("agent_error", 1.0)]
)
def test_a_run_that_the_policy_made_fail_is_a_failed_answer(status: str, is_failed: float) -> None:
    turns = [{"is_format_ok": True}] if status == "truncated" else []
    cause = Cause.POLICY if is_failed else Cause.NONE
    answer = {"status": status, "cause": cause, "answer": "", "turns": turns, "usage": {"completion_tokens": 7}}
    figures = run_figures(answer)
    assert figures is not None and figures["failure_share"] == is_failed and figures["empty_share"] == 1.0
    tally = Tally()
    tally.add({"failure_share": 0.0, **figures, "latency_s": 0.5})
    assert tally.sums["failure_share"] == [1, is_failed, is_failed]


def test_a_task_that_does_not_fit_the_context_counts_for_no_team() -> None:
    answer = {"status": "truncated", "cause": "", "answer": "", "turns": [], "usage": {"completion_tokens": 0}}
    assert run_figures(answer) is None


@pytest.mark.parametrize("turns", [[], [{"is_format_ok": True}]])
def test_a_run_that_failed_whatever_a_model_wrote_counts_for_no_team(turns: list[Any]) -> None:
    usage = {"completion_tokens": len(turns)}
    answer = {"status": "agent_error", "cause": "author", "answer": "", "turns": turns, "usage": usage}
    assert run_figures(answer) is None
