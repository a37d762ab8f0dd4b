"""progress: what the terminal shows while a run goes on: a moving line per stage, a table per iteration, the result."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipelines.report import charts
from pipelines.report.page import failures, repeated_in_words
from stores.journal.stage_results import CHOSEN, Measured

if TYPE_CHECKING:
    from pipelines.report.record import Written

LOG_WIDTH = 110
"""Columns where output goes to a file."""


class Screen:
    """Writes to a terminal, or plain lines where there is none."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console = Console(width=LOG_WIDTH, stderr=self.console.stderr)
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

    def result(self, written: Written, *, commands: Mapping[str, str]) -> None:
        """Shows accuracy before and after, the difference, where the reports are, what extensions say, and what to do next.

        Args: commands: what each is for.
        """
        report = written.report
        if report.get("delta") is not None:
            low, high = report["delta_ci95"]
            self.console.print(
                f"[bold]accuracy {report['before']['accuracy']:.3f} -> {report['after']['accuracy']:.3f}[/], gain "
                f"{report['delta']:+.3f} \\[{low:+.3f}, {high:+.3f}] in {report['seconds']['total']:.0f} s, "
                f"team version {report['team_version']}"
            )
        for line in (*written.paths.values(), *written.lines):
            self.say(line)
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
        if self.word.startswith("skipped"):
            return Text(f"– {head}{self.name}  {self.word}", style="dim")
        text = Text("✓ " if is_done else "… ", style="green" if is_done else "cyan")
        text.append(f"{head}{self.name}", style="default")
        text.append(f"{amount}  {time.monotonic() - self.began:.1f} s  {self.word}".rstrip(), style="dim")
        return text


# ---- the table of an iteration

_GROUP_NAMES = ("kl", "entropy", "logprob gap", "grad norm")


def iteration_table(row: Mapping[str, Any]) -> Group:
    """Returns a table with a row per agent (reward, format, funnel), then a line per model group and one for the seconds.

    `row` is an iteration as in `ReportData.iterations`; a dash stands for what was not measured.
    """
    agents, funnel = row.get("agents") or {}, row.get("funnel") or {}
    steps = list(dict.fromkeys(step for counts in funnel.values() for step in counts))
    table = Table(box=SIMPLE_HEAD, title=escape(_title(row)), title_justify="left", title_style="bold")
    table.add_column("agent", overflow="fold")
    for name in ("reward", "format", *(_short(step) for step in steps)):
        table.add_column(name, justify="right", overflow="fold")
    for agent in dict.fromkeys([*agents, *funnel]):
        values, counts = agents.get(agent) or {}, funnel.get(agent) or {}
        cells = [_number(values.get("reward"), ".3f"), _number(values.get("format"), ".1%")]
        cells += [_number(counts.get(step), ",.0f") for step in steps]
        table.add_row(escape(agent), *cells)
    return Group(table, Text(_caption(row)))


def _title(row: Mapping[str, Any]) -> str:
    metrics = row.get("metrics") or {}
    parts = [f"iteration {row['iteration']}"]
    for name, label, spec in (("reward", "reward", ".3f"), ("accuracy", "accuracy", ".1%")):
        if _number(metrics.get(name), spec) != "–":
            parts.append(f"{label} {metrics[name]:{spec}}")
    speed = _number(metrics.get("tokens_per_s"), ",.0f")
    parts += [f"{speed} tokens/s"] if speed != "–" else []
    seconds = charts.total_seconds(row)
    return " · ".join([*parts, f"{seconds:.1f} s"] if seconds else parts)


def _caption(row: Mapping[str, Any]) -> str:
    lines = []
    for group, values in (row.get("groups") or {}).items():
        parts = []
        for name, (_, metric) in zip(_GROUP_NAMES, charts.TRAIN_PANELS, strict=True):
            value = _number(charts.metric(values, metric), ".3g")
            gap_max = _number(charts.metric(values, "logprob_gap_max"), ".2g") if name == "logprob gap" else "–"
            if value != "–":
                parts.append(f"{name} {value}" + (f" (max {gap_max})" if gap_max != "–" else ""))
        lines.append(f"{group}: {', '.join(parts)}" if parts else f"{group}: not trained")
    cached = {agent: _number(v.get("cached_prompt_share"), ".0%") for agent, v in (row.get("agents") or {}).items()}
    if shares := ", ".join(f"{agent} {share}" for agent, share in cached.items() if share != "–"):
        lines.append(f"prompt tokens from the prefix cache: {shares}")
    lines += [f"{agent} chooses: {shares}" for agent, v in (row.get("agents") or {}).items() if (shares := _chosen(v))]
    stages = [f"{k} {v:.1f}" for k, v in (row.get("seconds") or {}).items() if k != "total"]
    overhead = charts.overhead_share(row)
    if failures(row.get("causes")):
        lines.append("failed: " + ", ".join(f"{n} by {c}" for c, n in sorted(row["causes"].items()) if c != "sound"))
    if repeated := repeated_in_words(row.get("repeated")):
        lines.append(f"repeated calls: {repeated}")
    if stages:
        lines.append("seconds: " + ", ".join(stages) + (f" · overhead {overhead:.0%}" if overhead is not None else ""))
    result = row.get("evaluation")
    if result and result.get("verdict"):
        lines.append(f"gate: {result['verdict']}, {result.get('condition', '')}")
    return "\n".join([*lines, *(f"! {warning}" for warning in row.get("warnings") or ())])


def _chosen(values: Mapping[str, Any]) -> str:
    """Describes an agent's choices; empty where it makes none."""
    taken = {name.removeprefix(CHOSEN): share for name, share in values.items() if name.startswith(CHOSEN)}
    return ", ".join(f"{name} {share:.0%}" for name, share in sorted(taken.items(), key=lambda item: -item[1]))


def _short(step: str) -> str:
    return {"non_zero_advantage": "adv ≠ 0", "episodes_ok": "ok", "with_ids": "with ids"}.get(
        step, step.replace("_", " ")
    )


def _number(value: Any, spec: str) -> str:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return format(value, spec) if is_number else "–"
