"""`troupe diff` finds an episode of both versions however many others of the same task are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipelines.report.inspect import diff_view
from serve_apps.workflows.alone import PATH as ALONE
from stores.traces import TraceStore
from stores.types import Purpose, Trace

pytestmark = pytest.mark.test


@pytest.fixture
def run(tmp_path: Path, make_trace: Callable[..., Trace]) -> Any:
    """A run of three versions: 1,200 episodes of one task by the first, one by the third, which was stored last."""
    store = TraceStore(str(tmp_path / "traces"))
    store.create()
    trace = replace(make_trace(0), turns=(), tool_calls=(), policy_versions={"g": 0}, answer="the first one's")
    store.write_episodes([replace(trace, episode_id=f"e{i:04}", episode_index=i) for i in range(1_200)])
    late = replace(trace, purpose=Purpose.GATE, policy_versions={"g": 2}, answer="the last one's")
    store.write_episodes([replace(late, episode_id="late"), replace(late, episode_id="v", variant="greedy")])

    def trained(iteration: int) -> dict[str, Any]:
        return {"g": SimpleNamespace(version=iteration)}

    return SimpleNamespace(run_id="run", traces=store, traces_uri=store.uri, trained=trained)


def test_the_last_stored_episode_is_found_behind_a_thousand_others(run: Any) -> None:
    console = Console(record=True, width=200)
    console.print(diff_view(run, "t0", 0, 2))
    text = console.export_text()
    assert "the first one's" in text and "the last one's" in text and "gate of iteration 3" in text


def test_versions_that_never_played_the_task_are_told_with_those_that_did(run: Any) -> None:
    with pytest.raises(ValueError, match=r"not played by versions \{'g': 1\}.*\{'g': 0\}.*, among others"):
        diff_view(run, "t0", 0, 1)
    with pytest.raises(ValueError, match=r"versions that played it: none$"):
        diff_view(run, "nobody's", 0, 1)


def test_the_control_of_the_same_versions_is_not_shown_for_the_team(run: Any) -> None:
    late = run.traces.get_trace("late", run_id="run")
    alone = replace(late, episode_id="alone", purpose=Purpose.TEST, workflow=ALONE, answer="the control's")
    run.traces.write_episodes([alone])
    console = Console(record=True, width=200)
    console.print(diff_view(run, "t0", 0, 2))
    text = console.export_text()
    assert "the last one's" in text and "the control's" not in text
