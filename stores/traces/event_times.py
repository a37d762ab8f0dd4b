"""event_times: rows of episodes -> when each episode, each of its turns and each of its tool calls began and ended.

Whole columns are computed at once: no record is made, and no token is converted.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

COLUMNS = ("started_at", "duration_s", "turns", "tool_calls")
"""What is read of an episode's row."""
EPISODE, TURN, TOOL_CALL = "episode", "turn", "tool_call"
EVENT_TIMES = pa.schema(
    [("kind", pa.string()), ("name", pa.string()), ("start_s", pa.float64()), ("end_s", pa.float64())]
)


def event_times(batch: pa.RecordBatch) -> pa.Table:
    """Returns a row {kind, name, start_s, end_s} per event, in Unix seconds by the clock of the machine that played it.

    The kind is `episode`, `turn` or `tool_call`; the name is that of the turn's model group or of the tool, empty for an
    episode. Args: batch: has the columns of `COLUMNS`.
    """
    began = batch["started_at"]
    nameless = pa.array([""] * len(began), pa.string())
    return pa.concat_tables(
        [
            _table(EPISODE, nameless, began, batch["duration_s"]),
            _nested(TURN, "model_group", batch["turns"], began),
            _nested(TOOL_CALL, "tool", batch["tool_calls"], began),
        ]
    )


def _nested(kind: str, name: str, events: pa.ListArray, began: pa.Array) -> pa.Table:
    each = pc.list_flatten(events)
    of_episode = began.take(pc.list_parent_indices(events))
    start = pc.add(of_episode, pc.struct_field(each, "start_s"))
    return _table(kind, pc.struct_field(each, name), start, pc.struct_field(each, "duration_s"))


def _table(kind: str, name: pa.Array, start_s: pa.Array, duration_s: pa.Array) -> pa.Table:
    kinds = pa.array([kind] * len(start_s), pa.string())
    return pa.Table.from_arrays([kinds, name, start_s, pc.add(start_s, duration_s)], schema=EVENT_TIMES)
