"""Which failures fail a sampling pass: those of infrastructure and author, and tasks that fail whatever was sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipelines.config.sections import CollectConfig
from pipelines.episodes.sampling import InfrastructureFailures, TooManyFailures, _check_failures

pytestmark = pytest.mark.fast

CONFIG = CollectConfig(max_failed_share=0.1)
CRASH = {"status": "agent_error", "cause": "policy", "stop_reason": "workflow_raised", "error": "KeyError: 'x' at 7"}


def check(*failed: dict[str, str], said: str = "text {i}", num: int = 8) -> None:
    """Checks groups of two episodes: these failed first, the others are sound."""
    sound = {"status": "ok", "cause": "", "stop_reason": "finished", "error": ""}
    rows = [{"episode_id": f"e{i}", "group_id": f"g{i // 2}", **sound} for i in range(num)]
    for i, fault in enumerate(failed):
        rows[i] |= fault
    store: Any = SimpleNamespace(completions_of=lambda ids: {e: (said.format(i=e),) for e in ids})
    _check_failures(pa.Table.from_pylist(rows), {row["group_id"] for row in rows}, store=store, config=CONFIG)


def test_failures_of_the_policy_may_be_as_many_as_they_are() -> None:
    refused = {
        "status": "tool_error",
        "cause": "policy",
        "stop_reason": "tool_refused",
        "error": "number: not a number",
    }
    check(*[refused] * 8)
    check(*[{"status": "timeout", "cause": "policy", "stop_reason": "timeout", "error": "no end"}] * 8)


@pytest.mark.parametrize(("cause", "error"), [("infrastructure", InfrastructureFailures), ("author", TooManyFailures)])
def test_failures_of_infrastructure_and_author_fail_the_pass(cause: str, error: type[Exception]) -> None:
    fault = {"status": "tool_error", "cause": cause, "stop_reason": "tool_failed", "error": "the service is down"}
    with pytest.raises(error, match=r"1 of 8 episodes failed .*1 x tool_error: the service is down; a repetition"):
        check(fault)


def test_tasks_whose_episodes_all_fail_alike_whatever_was_sampled_fail_the_pass() -> None:
    with pytest.raises(TooManyFailures, match=r"2 of 8 .*2 x agent_error: KeyError: 'x' at # \(whatever was sampled"):
        check(CRASH, {**CRASH, "error": "KeyError: 'x' at 8"})


@pytest.mark.parametrize("other", [{}, {**CRASH, "error": "KeyError: 'y'"}, {**CRASH, "stop_reason": "tool_refused"}])
def test_a_task_of_which_an_episode_ends_otherwise_is_none_of_these(other: dict[str, str]) -> None:
    check(CRASH, other)


def test_a_policy_that_always_says_the_same_shows_nothing() -> None:
    check(CRASH, CRASH, said="the same")
