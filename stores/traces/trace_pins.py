"""trace_pins: rows of one version of a trace store's tables -> the tag that keeps them, named by a hash of what they hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from stores.traces.trace_filters import pinned_by
from stores.traces.trace_tables import plain
from stores.types import RewardsRef, TracesRef

if TYPE_CHECKING:
    from lancedb.table import Table

DIGITS = 16
"""Of the hash in a tag's name."""
PLAYED = ("episode_id", "status", "started_at", "duration_s")
"""Columns by which a failed episode and its repetition differ, which have the same id."""


def played_rows(table: Table, where: str) -> list[tuple[str, ...]]:
    """Returns the `PLAYED` columns of the matching episodes as text, sorted."""
    episodes = table.search().where(where).select(list(PLAYED)).to_arrow()
    columns = [map(str, episodes[name].to_pylist()) for name in PLAYED]
    return sorted(zip(*columns, strict=True))


def has_same_rows(newer: Table, pinned: Table, ref: TracesRef | RewardsRef) -> bool:
    """Says whether the rows that a ref pins are the same in a newer version; rewards are added, but never replaced."""
    where = pinned_by(ref)
    if newer.count_rows(where) != pinned.count_rows(where):
        return False
    return isinstance(ref, RewardsRef) or played_rows(newer, where) == played_rows(pinned, where)


def pin(
    table: Table,
    rows: Sequence[str] | Sequence[tuple[str, ...]],
    *parts: str,
    by_run: str,
    unseen: Sequence[str] = (),
) -> tuple[str, int]:
    """Creates the tag of these rows, or takes the one that another process created first; returns tag and version.

    Args:
        rows: what tells the rows from all that may stand in their place; sorted.
        parts: begin the name, for people.
        by_run: the run that pins; a tag is of one run, and its maintenance alone may drop it.
        unseen: what else makes refs to this tag differ.
    """
    digest = sha256(json.dumps([parts, rows, unseen]).encode()).hexdigest()[:DIGITS]
    tag = plain("-".join((*parts, f"n{len(rows)}", _mark_of(by_run), digest)))
    try:
        table.tags.create(tag, table.version)
    except RuntimeError as error:
        if "already exists" not in str(error):
            raise
    return tag, table.tags.get_version(tag)


def is_pinned_by(tag: str, run_id: str) -> bool:
    """Says whether this run pinned the tag, whichever run the rows are of; it did not pin a tag that was made by hand."""
    *_, mark, digest = ["", "", *tag.split("-")]
    return mark == _mark_of(run_id) and len(digest) == DIGITS


def _mark_of(run_id: str) -> str:
    """Returns what names a run in a tag: names of runs may begin with each other, or differ only where `plain` does not."""
    return sha256(run_id.encode()).hexdigest()[:8]
