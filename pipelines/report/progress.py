"""progress: what the terminal shows while a run goes on: a moving line per stage, a table per iteration, the result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from stores.journal.stage_results import Measured

LOG_WIDTH = 110
"""Columns where output goes to a file."""


class Screen:
    """Writes to a terminal, or plain lines where there is none."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console = Console(width=LOG_WIDTH)
        self._lock = threading.Lock()
        self._lines: list[_Line] = []
        self._live: Live | None = None

    @contextmanager
    def stage(self, name: str, iteration: int | None = None) -> Iterator[Callable[..., None]]:
        """Shows a line for one stage; yields a function to call with (done, total, word or number) when there is progress."""
        line = _Line(name, iteration)
        if not self.console.is_terminal:
            yield line.update
            self.console.print(line.render(is_done=True), soft_wrap=True)
            return
        with self._shown(line):
            yield line.update
        self.console.print(line.render(is_done=True))

    @contextmanager
    def _shown(self, line: _Line) -> Iterator[None]:
        """Shows a line below what is printed, beside those of stages that go on at the same time."""
        with self._lock:
            self._lines.append(line)
            if self._live is None:
                self._live = Live(
                    get_renderable=lambda: Group(*self._lines),
                    console=self.console,
                    refresh_per_second=4,
                    transient=True,
                )
                self._live.start()
        try:
            yield
        finally:
            with self._lock:
                self._lines.remove(line)
                if not self._lines and self._live is not None:
                    self._live.stop()
                    self._live = None

    def say(self, line: str) -> None:
        """Prints a line as it is: Rich would read `[...]` in a path or a name as markup."""
        self.console.print(Text(line), soft_wrap=True)

    def iteration(self, summary: Mapping[str, Any]) -> None:
        """Shows the table of a finished iteration."""
        from pipelines.report.sections import iteration_table

        self.console.print(iteration_table(summary))
        for group, proof in summary.get("proofs", {}).items():
            if proof["is_indistinguishable"]:
                self.say(
                    f"sync: {group} v{summary['versions'][group]} differs from the version before by {proof['difference_old']:.2g} "
                    f"nats, and the engine rounds by up to {proof['noise']:.2g}: that it is served rests on the hashes of its files"
                )

    def measured(self, name: str, measured: Measured | None) -> None:
        """Shows the accuracy on the test tasks, with its interval."""
        if measured is not None:
            score = measured.score
            low, high = score.ci95
            self.console.print(
                f"[bold]{name}[/]: accuracy {score.accuracy:.3f} \\[{low:.3f}, {high:.3f}] on {score.num_tasks} "
                "test tasks that neither training nor the gate sees"
            )

    def result(self, report: Mapping[str, Any], paths: Sequence[str], *, commands: Mapping[str, str]) -> None:
        """Shows accuracy before and after, the difference, where the reports are, the largest waits, and what to do next.

        Args: commands: what each is for.
        """
        if report["before"] and report["after"]:
            low, high = report["delta_ci95"]
            self.console.print(
                f"[bold]accuracy {report['before']['accuracy']:.3f} -> {report['after']['accuracy']:.3f}[/], gain "
                f"{report['delta']:+.3f} \\[{low:+.3f}, {high:+.3f}] in {report['seconds']['total']:.0f} s, "
                f"team version {report['team_version']}"
            )
        for path in paths:
            self.say(path)
        if report["waits"]:
            self.console.print("[bold]the largest waits[/]")
        for number, wait in enumerate(report["waits"], 1):
            self.say(f"{number}. {wait['sentence']}")
        self.console.print("[bold]next[/]")
        width = max(map(len, commands))
        for command, purpose in commands.items():
            self.say(f"{command:<{width}}  {purpose}")


class _Line:
    """The line that shows how far one stage is."""

    def __init__(self, name: str, iteration: int | None) -> None:
        self.name, self.iteration = name, iteration
        self.began = time.monotonic()
        self.done, self.total, self.word = 0, 0, ""

    def update(self, done: int, total: int, word: str | float = "") -> None:
        self.done, self.total = done, total
        self.word = word if isinstance(word, str) else f"loss {word:.3f}"

    def __rich__(self) -> Text:
        return self.render()

    def render(self, *, is_done: bool = False) -> Text:
        head = f"iteration {self.iteration} " if self.iteration is not None else ""
        amount = f"  {self.done}/{self.total}" if self.total else ""
        text = Text("✓ " if is_done else "… ", style="green" if is_done else "cyan")
        text.append(f"{head}{self.name}", style="default")
        text.append(f"{amount}  {time.monotonic() - self.began:.1f} s  {self.word}".rstrip(), style="dim")
        return text
