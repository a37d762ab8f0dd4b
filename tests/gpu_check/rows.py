"""rows: what a part measured, one row per stage -> a Markdown table for the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COLUMNS = ("part", "stage", "seconds", "GPU memory, GiB: peak", "after", "seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stage of one part."""

    stage: str
    seconds: float | None = None
    peak_gib: float | None = None
    """The most memory that was used on the fullest GPU; None without a GPU."""
    last_gib: float | None = None
    """The memory that was still used at the end."""
    seen: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one part: `passed`, `left out` or `failed`, and why."""

    verdict: str
    reason: str = ""
    rows: Sequence[Row] = ()


def markdown(outcomes: Mapping[str, Outcome], *, machine: str) -> str:
    """The table of all parts, with the machine above it."""
    lines = [machine, "", _line(COLUMNS), "|" + "---|" * len(COLUMNS)]
    for part, outcome in outcomes.items():
        lines += [_line((part, row.stage, *map(_number, (row.seconds, row.peak_gib, row.last_gib)), row.seen))
                  for row in outcome.rows]  # fmt: skip
        lines.append(_line((part, f"**{outcome.verdict}**", "", "", "", outcome.reason)))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
