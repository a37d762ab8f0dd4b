"""trace_tables: kind of row, run and iteration <-> the name of the table that holds them in a trace store."""

from __future__ import annotations

import re

_NAME = re.compile(r"(?P<kind>[a-z]+)\.(?P<run>.+)\.it(?P<iteration>\d+)")


def table_name(kind: str, run_id: str, iteration: int) -> str:
    """Returns the name of the table that holds this iteration's rows of `episodes` or `rewards`.

    Runs whose names differ only in characters that LanceDB refuses share a table: its rows have the name of their run.
    """
    return f"{kind}.{plain(run_id)}.it{iteration}"


def iteration_of_table(name: str) -> int:
    """Returns the iteration whose rows a table holds; 0 for the tables that are made with the store."""
    match = _NAME.fullmatch(name)
    return int(match["iteration"]) if match else 0


def is_table_of(name: str, kind: str, run_id: str | None = None) -> bool:
    """Says whether a table holds such rows of one iteration, of this run or of any."""
    match = _NAME.fullmatch(name)
    return match is not None and match["kind"] == kind and (run_id is None or match["run"] == plain(run_id))


def plain(text: str) -> str:
    """Replaces the characters that Lance refuses in names of tables and in tags."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)
