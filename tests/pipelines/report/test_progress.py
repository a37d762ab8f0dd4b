"""What the terminal shows while stages go on, one after another and side by side, and at the end of a run."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from pipelines.cli.options import telling
from pipelines.report.progress import Screen
from pipelines.report.record import Written

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


def test_the_files_are_followed_by_what_extensions_say_and_what_to_do_next() -> None:
    console = Console(file=StringIO(), width=200, force_terminal=True, color_system=None)
    files = {name: f"runs/[demo]/{name}" for name in ("report.json", "timeline.json")}
    written = Written(report={"before": None, "after": None}, paths=files, lines=["1. engines waited: [a] was at work"])
    with console.capture() as text:
        Screen(console).result(written, commands={"troupe show --run [demo]": "lists episodes"})
    assert text.get().splitlines() == [
        *files.values(),
        "1. engines waited: [a] was at work",
        "next",
        "troupe show --run [demo]  lists episodes",
    ]


def test_a_stage_that_is_skipped_says_why_and_takes_no_time() -> None:
    screen = Screen(terminal())
    with screen.stage("evaluate", 1) as progress:
        progress(0, 0, "skipped: evaluate.every = 4")
    last = shown(screen.console).splitlines()[-1]
    assert "– iteration 1 evaluate  skipped: evaluate.every = 4" in last and "✓" not in last


def test_a_command_tells_on_standard_error_what_it_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    with telling("load demo@champion"):
        assert capsys.readouterr() == ("", "… load demo@champion\n")
    done = capsys.readouterr()
    assert done.out == "" and done.err.startswith("✓ load demo@champion  0.")
