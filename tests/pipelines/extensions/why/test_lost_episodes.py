"""What `troupe why --lost-at` says of the tasks that a candidate lost."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from pipelines.extensions.why import why
from pipelines.extensions.why.lost_tasks import lost_tasks_view
from pipelines.run.run import Run
from tests.pipelines.runners import answers_five
from tests.pipelines.runners.answers_five import Played

pytestmark = pytest.mark.test

by_hand = answers_five.by_hand


def test_an_episode_that_cannot_be_replayed_leaves_the_other_lost_tasks_explained(
    by_hand: tuple[Run, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = by_hand

    def explained(run: Run, episode_id: str, *, budget: int) -> dict[str, Any]:
        if episode_id == "b":
            raise ValueError("episode b: the workflow makes another call")
        return {"episode_id": episode_id, "agent": "solver", "is_certain": True, "cost": 0.5}

    monkeypatch.setattr(why, "explain", explained)
    monkeypatch.setattr(why, "lost_episodes", lambda run, iteration: ["a", "b", "c", "d"])
    found = why.explain_lost_tasks(run, 3, tasks=3, budget=8)
    assert [one["episode_id"] for one in found.explanations] == ["a", "c"] and found.num_lost == 4
    console = Console(file=StringIO(), width=200)
    console.print(lost_tasks_view(found))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "did worse than the champion on 4 tasks; 2 are explained" in shown
    assert "not explained: episode b: the workflow makes another call" in shown
    assert [part.strip() for part in shown.splitlines()[4].strip("│ ").split("│")] == ["solver", "2", "2", "1.000"]
