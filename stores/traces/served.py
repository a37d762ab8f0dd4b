"""served: stores episodes of production traffic that may be kept, and callers' feedback on them. LanceDB.

    gateway ── write_episodes ──> [episodes]      a caller's feedback ── write_feedback ──> [feedback]
    collect ── judged ──> episodes with the newest feedback on each

The tables are apart from those of runs, and one holds all episodes. Nothing is pinned: what `drop_before` removes is
gone from the disk, too, with the first or second call that is `READER_GRACE` later.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import ClassVar

import pyarrow as pa

from stores.traces import rows
from stores.traces.store import TraceStore
from stores.traces.tables import TraceTables, quoted
from stores.traces.upkeep import MARGIN_S, age
from stores.types import SERVED, Trace

FEEDBACK = pa.schema(
    [
        pa.field("feedback_id", pa.string(), nullable=False, metadata=rows.KEY_METADATA),
        ("trace_id", pa.string()),
        ("key", pa.string()),
        ("at", pa.float64()),
        ("score", pa.float64()),
        ("label", pa.string()),
        ("comment", pa.string()),
        ("answer", pa.string()),
    ]
)

READER_GRACE = timedelta(hours=1)
"""Versions that were replaced longer ago are dropped: nobody reads them, or merges into them, any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """A caller's feedback on an answer."""

    trace_id: str
    key: str
    """Name of the API key with which it was sent; the newest feedback of a key on a trace replaces the one before."""
    at: float
    """Unix seconds."""
    score: float | None = None
    """-1 to 1."""
    label: str | None = None
    comment: str | None = None
    answer: str | None = None
    """The right answer, in the caller's opinion."""


class ServedTables(TraceTables):
    """The tables of a store of served episodes: one of each kind, whatever the run and iteration."""

    def name_for(self, kind: str, run_id: str, iteration: int) -> str:
        """Names the one table of this kind."""
        return kind

    def names_for(self, kind: str, *, run_id: str | None = None, iteration: int | None = None) -> list[str]:
        """Names the one table of this kind."""
        return [kind]


class ServedStore(TraceStore):
    """Served episodes and their feedback at one LanceDB URI."""

    schemas: ClassVar[Mapping[str, pa.Schema]] = {**TraceStore.schemas, "feedback": FEEDBACK}
    _tables_class = ServedTables

    def is_there(self) -> bool:
        """Says whether this store was ever created."""
        return self._tables.open_if_there("episodes") is not None

    def write_feedback(self, *feedback: Feedback) -> None:
        """Stores feedback; it replaces earlier feedback of the same key on the same trace."""
        new_rows = [asdict(f) | {"feedback_id": f"{f.trace_id}/{f.key}"} for f in feedback]
        merge = self._tables.open("feedback").merge_insert("feedback_id").use_index(False)
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        with self._tables.naming("feedback"):
            merge.execute(pa.Table.from_pylist(new_rows, schema=FEEDBACK), timeout=timedelta(minutes=1))

    def write_judged(self, traces: Sequence[Trace], feedback: Sequence[Feedback]) -> None:
        """Stores episodes together with the feedback that came with them."""
        self.write_episodes(traces)
        if feedback:
            self.write_feedback(*feedback)

    def feedback_on(self, trace_ids: Sequence[str] | None = None) -> list[Feedback]:
        """Returns the feedback on these traces, or on all, oldest first."""
        query = self._tables.open("feedback").search().select([f.name for f in FEEDBACK if f.name != "feedback_id"])
        if trace_ids is not None:
            query = query.where(f"trace_id IN ({quoted(trace_ids)})" if trace_ids else "false")
        with self._tables.naming("feedback"):
            found = query.to_list()
        return sorted((Feedback(**row) for row in found), key=lambda f: f.at)

    def judged(self, *, since: float) -> list[tuple[Trace, Feedback]]:
        """Returns episodes begun since then (Unix seconds) that have feedback, each with the newest, oldest episode first."""
        newest = {feedback.trace_id: feedback for feedback in self.feedback_on()}
        if not newest:
            return []
        traces = self._find(f"episode_id IN ({quoted(list(newest))}) AND started_at >= {since}", limit=len(newest))
        return [
            (trace, newest[trace.episode_id]) for trace in sorted(traces, key=lambda t: (t.started_at, t.episode_id))
        ]

    def served_since(
        self, since: float, *, team: str, version: int, limit: int, but: Collection[str] = ()
    ) -> list[Trace]:
        """Returns the newest answers of a team version begun after then (Unix seconds), at most `limit`, however many other teams gave.

        Args: but: ids that are left out.
        """
        columns = ["episode_id", "started_at", "outcome_metadata"]
        found = self._tables.scan("episodes", f"started_at > {since}", columns).to_pylist()
        new = [row for row in found if row["episode_id"] not in but and _is_by(row["outcome_metadata"], team, version)]
        new.sort(key=lambda row: (-row["started_at"], row["episode_id"]))
        ids = [row["episode_id"] for row in new[:limit]]
        return self._find(f"episode_id IN ({quoted(ids)})", limit=len(ids)) if ids else []

    def served(self, episode_id: str) -> Trace | None:
        """Returns the episode of exactly this id; None if it is not stored."""
        traces = self._find(f"episode_id = {quoted([episode_id])}", limit=1)
        return traces[0] if traces else None

    def kept_of(self, team: str, version: int) -> int:
        """Counts the stored answers of a team version."""
        column = self._tables.scan("episodes", "", ["outcome_metadata"])["outcome_metadata"]
        return sum(_is_by(text, team, version) for text in column.to_pylist())

    def drop_before(self, time_s: float) -> int:
        """Removes episodes begun before then (Unix seconds), with their feedback; returns how many.

        They leave the disk with the first or second call after `READER_GRACE`, even one that finds nothing to remove.
        """
        is_old = f"started_at < {time_s}"
        ids = self._tables.scan("episodes", is_old, ["episode_id"])["episode_id"].to_pylist()
        # Feedback first: if this is killed in between, the episodes are still there and are found again. What was sent while its
        # episode was removed is found by its own age.
        self._remove("feedback", f"at < {time_s}" + (f" OR trace_id IN ({quoted(ids)})" if ids else ""), moved="at")
        self._remove("episodes", is_old, moved="started_at")
        for name in self.schemas:
            self._drop_replaced(name)
        return len(ids)

    def _remove(self, name: str, where: str, *, moved: str) -> None:
        """Removes rows, so that no file of the newest version has them; `moved` is any column.

        Lance only marks deleted rows, and keeps a file of which they are few. So the rows that stay move to new files first:
        then each old file has no row left and goes; if this is killed in between, the next call finds the same rows.
        """
        table = self._tables.open(name)
        with self._tables.naming(name):
            if table.count_rows(where):
                table.update(where=f"({where}) IS NOT TRUE", values_sql={moved: moved})
                table.delete(where)

    def _drop_replaced(self, name: str) -> None:
        """Drops versions that were replaced longer than `READER_GRACE` ago: a reader or writer may be at a later one now."""
        ages = {v["version"]: age(v["timestamp"]) for v in self._tables.open(name).list_versions()}
        if len(ages) > 1:
            newest_then = max((version for version in ages if ages[version] >= READER_GRACE), default=0)
            # Lance keeps the newest version whatever its age, so that it needs no margin.
            self.compact(drop_before={name: newest_then}, margin_s=0 if newest_then == max(ages) else MARGIN_S)


def _is_by(metadata: str, team: str, version: int) -> bool:
    """Says whether this version of a team gave the answer with this `outcome_metadata`."""
    about = json.loads(metadata).get(SERVED, {})
    return (about.get("team"), about.get("team_version")) == (team, version)
