"""What canary and guards see of a workflow run: it failed where a model made it fail, and says nothing where the task did."""

from __future__ import annotations

from typing import Any

import pytest

from serve_apps.gateway.traffic.figures import Tally, run_figures
from stores.types import Cause

pytestmark = pytest.mark.fast


WELL = [{"is_format_ok": True}]


@pytest.mark.parametrize(
    ("status", "cause", "turns", "failed"),
    [
        ("ok", Cause.NONE, [], 0.0),
        ("truncated", Cause.NONE, WELL, 0.0),
        ("tool_error", Cause.POLICY, [], 1.0),
        ("agent_error", Cause.POLICY, [], 1.0),
        ("truncated", Cause.NONE, [], None),
        ("agent_error", Cause.AUTHOR, [], None),
        ("agent_error", Cause.AUTHOR, WELL, None),
    ],
)
def test_a_run_that_the_policy_made_fail_is_a_failed_answer_and_one_that_the_task_did_counts_for_no_team(
    status: str, cause: Cause, turns: list[Any], failed: float | None
) -> None:
    answer = {"status": status, "cause": cause, "answer": "", "turns": turns, "usage": {"completion_tokens": 7}}
    figures = run_figures(answer)
    assert (None if figures is None else figures["failure_share"]) == failed
    if figures is not None:
        assert figures["empty_share"] == 1.0
        tally = Tally()
        tally.add({"failure_share": 0.0, **figures, "latency_s": 0.5})
        assert tally.sums["failure_share"] == [1, failed, failed]
