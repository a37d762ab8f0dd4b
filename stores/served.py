"""served: answers to people that may be kept, and what was said of them. LanceDB, apart from what a run samples.

    gateway ── write_episodes ──> [episodes]      a caller's judgement ── write_feedback ──> [feedback]
    collect ── judged ──> episodes with the newest feedback on each

Nothing here is pinned: what is too old is gone from the disk, too (`drop_before`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import ClassVar

import pyarrow as pa

from stores import rows
from stores.traces import TraceStore, quoted
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What a caller thinks of an answer."""

    trace_id: str
    key: str
    """Name of the API key that it came by; its newest word on a trace replaces the one before."""
    at: float
    """Unix seconds."""
    score: float | None = None
    """-1 to 1."""
    label: str | None = None
    comment: str | None = None
    answer: str | None = None
    """What would have been right."""


class ServedStore(TraceStore):
    """Served episodes and their feedback at one LanceDB URI."""

    schemas: ClassVar[Mapping[str, pa.Schema]] = {**TraceStore.schemas, "feedback": FEEDBACK}

    def is_there(self) -> bool:
        """Whether anything was ever to be kept here."""
        return self._open_if_there("episodes") is not None

    def write_feedback(self, *feedback: Feedback) -> None:
        """Stores it, in place of what the same key said of the same trace."""
        found = [asdict(one) | {"feedback_id": f"{one.trace_id}/{one.key}"} for one in feedback]
        merge = self._open("feedback").merge_insert("feedback_id").use_index(False)
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        merge.execute(pa.Table.from_pylist(found, schema=FEEDBACK), timeout=timedelta(minutes=1))

    def write_judged(self, traces: Sequence[Trace], feedback: Sequence[Feedback]) -> None:
        """Episodes, and what was said of them when they ended."""
        self.write_episodes(traces)
        if feedback:
            self.write_feedback(*feedback)

    def feedback_on(self, trace_ids: Sequence[str] | None = None) -> list[Feedback]:
        """What was said of these traces, or of all, oldest first."""
        query = self._open("feedback").search().select([f.name for f in FEEDBACK if f.name != "feedback_id"])
        if trace_ids is not None:
            query = query.where(f"trace_id IN ({quoted(trace_ids)})" if trace_ids else "false")
        return sorted((Feedback(**row) for row in query.to_list()), key=lambda f: f.at)

    def judged(self, *, since: float) -> list[tuple[Trace, Feedback]]:
        """Episodes begun since then (Unix seconds) that somebody has judged, with the newest word, oldest episode first."""
        newest = {feedback.trace_id: feedback for feedback in self.feedback_on()}
        if not newest:
            return []
        found = self._find(f"episode_id IN ({quoted(list(newest))}) AND started_at >= {since}", limit=len(newest))
        return [
            (trace, newest[trace.episode_id]) for trace in sorted(found, key=lambda t: (t.started_at, t.episode_id))
        ]

    def served_since(self, since: float, *, limit: int) -> list[Trace]:
        """The newest episodes begun after then (Unix seconds), at most `limit`."""
        rows_of = self.newest_episodes(limit=limit)
        wanted = [row["episode_id"] for row in rows_of if row["started_at"] > since]
        return self._find(f"episode_id IN ({quoted(wanted)})", limit=len(wanted)) if wanted else []

    def served(self, episode_id: str) -> Trace | None:
        """The episode of exactly this id, if it is kept."""
        found = self._find(f"episode_id = {quoted([episode_id])}", limit=1)
        return found[0] if found else None

    def kept_of(self, team: str, version: int) -> int:
        """How many answers of a team version are kept."""
        told = self._open("episodes").search().select(["outcome_metadata"]).to_arrow()["outcome_metadata"]
        found = (json.loads(text).get(SERVED, {}) for text in told.to_pylist())
        return sum((of.get("team"), of.get("team_version")) == (team, version) for of in found)

    def drop_before(self, time_s: float) -> int:
        """Removes episodes begun before then (Unix seconds) and what was said of them, from the disk too; how many."""
        episodes = self._open("episodes")
        old = (
            episodes.search()
            .where(f"started_at < {time_s}")
            .select(["episode_id"])
            .to_arrow()["episode_id"]
            .to_pylist()
        )
        if not old:
            return 0
        self._open("feedback").delete(f"trace_id IN ({quoted(old)})")
        episodes.delete(f"started_at < {time_s}")
        for name in self.schemas:
            self._open(name).optimize(cleanup_older_than=timedelta(0))
        return len(old)
