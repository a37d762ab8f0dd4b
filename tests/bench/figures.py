"""figures: what a benchmark measured, how it is shown and where it is kept. Standard library and rich only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """One number; a limit is the least or the most that is allowed."""

    name: str
    value: float
    unit: str = ""
    """`x` for a ratio."""
    _: KW_ONLY
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """`ok` or `MISSED`; empty without a limit. A value that is not a number misses."""
        if self.least is None and self.most is None:
            return ""
        is_met = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        return "ok" if is_met else "MISSED"

    def to_dict(self) -> dict[str, Any]:
        """JSON values only, the verdict included."""
        return asdict(self) | {"verdict": self.verdict}


def ratio(name: str, ours: float, peer: float, *, least: float | None = None, note: str = "") -> Figure:
    """`ours / peer`, both rates."""
    return Figure(name, ours / max(peer, 1e-12), "x", least=least, note=note)


def figures_table(benches: Mapping[str, Mapping[str, Any]]) -> Table:
    """All benchmarks of a report as one table."""
    table = Table(title="Troupe benchmarks", title_justify="left")
    for name, justify in (("bench", "left"), ("figure", "left"), ("value", "right"), ("limit", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("")
    table.add_column("note", style="dim")
    for bench, entry in benches.items():
        for position, row in enumerate(_rows(entry)):
            table.add_row(bench if position == 0 else "", *row)
        table.add_section()
    return table


def _rows(entry: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    if entry["error"]:
        yield "[red]crashed[/]", "", "", "", entry["error"]
    for figure in entry["figures"]:
        bounds = {">=": figure.get("least"), "<=": figure.get("most")}
        limit = " ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)
        style = {"ok": "[green]ok[/]", "MISSED": "[bold red]MISSED[/]", "": ""}[figure["verdict"]]
        yield figure["name"], f"{_number(figure['value'])} {figure['unit']}".strip(), limit, style, figure["note"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
