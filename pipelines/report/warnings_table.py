"""report_symptoms: the warnings of a run's iterations -> a table for the page, and lines for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipelines.monitoring.training_warnings import Symptom, all_symptoms

_TONES = {"collapse": "bad", "hacking": "warn", "divergence": "bad"}


def symptoms_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every warning once, the newest first; a sentence where there is none. Nothing without iterations."""
    if not rows:
        return ""
    found = all_symptoms(rows)
    if not found:
        return "<div class='card'>No figure has left its usual range.</div>"
    head = "".join(f"<th>{name}</th>" for name in ("Iteration", "Symptom", "Where", "What was seen", "What to try"))
    body = "".join(_row(symptom) for symptom in sorted(found, key=lambda s: -s.iteration))
    return f"<div class='card scroll'><table><tr>{head}</tr>{body}</table></div>"


def symptom_lines(row: Mapping[str, Any]) -> list[str]:
    """The warnings of one iteration, a line each."""
    return [f"! {symptom}" for symptom in row.get("symptoms") or ()]


def _row(symptom: Symptom) -> str:
    return (
        f"<tr><td>{symptom.iteration}</td><td><span class='badge {_TONES[symptom.kind]}'>{symptom.kind}</span></td>"
        f"<td>{escape(symptom.where)}</td><td class='wide'>{escape(symptom.what)}</td>"
        f"<td class='wide'>{escape(symptom.try_)}</td></tr>"
    )
