"""What the terminal shows while stages go on, one after another and side by side, and at the end of a run."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from pipelines.report.progress import Screen

pytestmark = pytest.mark.fast


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def terminal() -> Console:
    return Console(file=StringIO(), force_terminal=True, width=80)


def test_lines_of_stages_that_end_crosswise_are_each_printed_once() -> None:
    screen = Screen(terminal())
    collect, train = screen.stage("collect", 3), screen.stage("train", 2)
    collect.__enter__()(3, 8)
    train.__enter__()(1, 1)
    collect.__exit__(None, None, None)
    train.__exit__(None, None, None)
    with screen.stage("sync", 2):
        pass
    done = [line for line in shown(screen.console).splitlines() if "✓" in line]
    names = [name for line in done for name in ("collect", "train", "sync") if name in line.rpartition("✓")[2]]
    assert names == ["collect", "train", "sync"]
    assert screen._live is None, "nothing moves any more"


def test_a_stage_that_fails_leaves_no_line_behind() -> None:
    screen = Screen(terminal())
    with pytest.raises(ValueError, match="broken"), screen.stage("train", 2):
        raise ValueError("broken")
    assert screen._live is None and "✓" not in shown(screen.console)


def shown_result(report: dict[str, Any]) -> list[str]:
    console = Console(file=StringIO(), width=200, force_terminal=True, color_system=None)
    with console.capture() as text:
        Screen(console).result(
            report,
            ["runs/[demo]/report.json", "runs/demo/timeline.json"],
            commands={"troupe show --run [demo]": "lists episodes"},
        )
    return text.get().splitlines()


def test_the_files_are_followed_by_the_largest_waits_and_what_to_do_next() -> None:
    waits = [
        "engines waited 31.2 s (42% of iteration 3): the trainer of model group [a] was at work",
        "trainers waited 20.0 s (27% of iteration 3): engines were at work (collect)",
    ]
    report = {"before": None, "after": None, "waits": [{"sentence": wait} for wait in waits]}
    assert shown_result(report) == [
        "runs/[demo]/report.json",
        "runs/demo/timeline.json",
        "the largest waits (every stage, call and trainer: open timeline.json in ui.perfetto.dev)",
        f"1. {waits[0]}",
        f"2. {waits[1]}",
        "next",
        "troupe show --run [demo]  lists episodes",
    ]


def test_a_run_without_waits_says_what_to_do_next_after_the_files() -> None:
    assert shown_result({"before": None, "after": None, "waits": []})[1:3] == ["runs/demo/timeline.json", "next"]
