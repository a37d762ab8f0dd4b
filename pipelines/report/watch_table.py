"""report_watch: the latest looks at a team -> a table of figures, what is usual of each, and whether it alarms."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any

_TONES = {"alarm": "bad", "sound": "good", "learning": "warn"}
_NAMES = {"iteration": "Training episodes of the latest iteration", "champion": "The champion, last watched"}
_HEAD = ("From", "Figure", "Now", "Usual", "Range", "Windows", "State")


def watch_tables(looks: Mapping[str, Mapping[str, Any] | None]) -> str:
    """A table per kind of look, alarms first; empty where nobody has looked."""
    return "".join(_table(_NAMES[kind], told) for kind, told in looks.items() if told is not None)


def _table(name: str, told: Mapping[str, Any]) -> str:
    rows = [(source, figure, found) for source, of in told["sources"].items() for figure, found in of.items()]
    rows.sort(key=lambda row: list(_TONES).index(row[2]["state"]))
    head = "".join(f"<th>{column}</th>" for column in _HEAD)
    body = "".join(_row(*row) for row in rows)
    badge = f"<span class='badge {_TONES[told['state']]}'>{told['state']}</span>"
    at = datetime.fromtimestamp(told["at"], UTC).strftime("%Y-%m-%d %H:%M UTC")
    said = "".join(f"<p>{escape(a['what'])}; try: {escape(a['try'])}</p>" for a in told["alarms"])
    said += "".join(f"<p class='dim'>{escape(source)}: {escape(num)}</p>" for source, num in told["waiting"].items())
    return (
        f"<figure class='card scroll'><figcaption>{name} {badge} <span class='dim'>{at}</span></figcaption>{said}"
        f"<table><tr>{head}</tr>{body}</table></figure>"
    )


def _row(source: str, figure: str, found: Mapping[str, Any]) -> str:
    low, high = (None if found[end] is None else f"{found[end]:.3g}" for end in ("low", "high"))
    usual = "–" if found["usual"] is None else f"{found['usual']:.3g}"
    span = f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}" if high else "–"
    cells = [f"<td>{escape(source)}</td><td>{escape(figure.replace('_', ' '))}</td>"]
    cells += [f"<td class='num'>{value}</td>" for value in (f"{found['now']:.3g}", usual, span, found["num_windows"])]
    return f"<tr>{''.join(cells)}<td><span class='badge {_TONES[found['state']]}'>{found['state']}</span></td></tr>"
