"""figures: what a benchmark measured, how it is shown and where it is kept. Standard library and rich only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number."""

    name: str
    value: float
    unit: str = ""
    """`x` for a ratio."""
    limit: float | None = None
    is_upper: bool = False
    """Whether `limit` is the most that is allowed; else it is the least."""
    note: str = ""

    @property
    def verdict(self) -> str:
        """`ok` or `MISSED`; empty without a limit. A value that is not a number misses."""
        if self.limit is None:
            return ""
        is_met = self.value <= self.limit if self.is_upper else self.value >= self.limit
        return "ok" if is_met else "MISSED"

    def to_dict(self) -> dict[str, Any]:
        """JSON values only, the verdict included."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "limit": self.limit,
            "is_upper": self.is_upper,
            "verdict": self.verdict,
            "note": self.note,
        }


def ratio(name: str, ours: float, peer: float, *, least: float | None = None, note: str = "") -> Figure:
    """`ours / peer`, both rates."""
    return Figure(name=name, value=ours / max(peer, 1e-12), unit="x", limit=least, note=note)


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
        limit = "" if figure["limit"] is None else f"{'<=' if figure['is_upper'] else '>='} {figure['limit']:g}"
        style = {"ok": "[green]ok[/]", "MISSED": "[bold red]MISSED[/]", "": ""}[figure["verdict"]]
        yield figure["name"], f"{_number(figure['value'])} {figure['unit']}".strip(), limit, style, figure["note"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
