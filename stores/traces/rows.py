"""rows: records <-> Arrow rows, one episode per row with its turns and tool calls nested.

    Trace ── episode_table ──> pyarrow.Table ── LanceDB ──> RecordBatch ── traces_of ──> Trace

Whole columns are converted at once: nothing here runs once per token. Token ids are int32, logprobs float32 (other floats
come back rounded), mappings of free form are JSON. Sequences come back as tuples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from stores.types import (
    Cause,
    EpisodeRewards,
    EpisodeStatus,
    FinishReason,
    Purpose,
    Sampling,
    Task,
    ToolCall,
    Trace,
    Turn,
    TurnReward,
)

R = TypeVar("R")

KEY_METADATA = {b"lance-schema:unenforced-primary-key:position": b"1"}
"""Declares the primary key with the table itself. Without it two concurrent merges of one key insert it twice."""

SAMPLING = pa.struct(
    [
        ("max_tokens", pa.int32()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("min_p", pa.float64()),
        ("constraint", pa.string()),
    ]
)
TURN = pa.struct(
    [
        ("turn_index", pa.int32()),
        ("agent", pa.string()),
        ("model_group", pa.string()),
        ("policy_version", pa.int32()),
        ("round_index", pa.int32()),
        ("parents", pa.list_(pa.int32())),
        ("prompt_text", pa.string()),
        ("completion_text", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("sampling", SAMPLING),
        ("seed", pa.int64()),
        ("finish_reason", pa.string()),
        ("is_format_ok", pa.bool_()),
        ("format_fault", pa.string()),
        ("fields", pa.string()),
        ("start_s", pa.float64()),
        ("duration_s", pa.float64()),
        ("num_attempts", pa.int32()),
        ("is_version_mixed", pa.bool_()),
        ("cut", pa.string()),
        ("num_cached_tokens", pa.int32()),
        ("option_logprobs", pa.string()),
    ]
)
TURN_JSON = ("fields", "cut", "option_logprobs")
"""What of a turn is stored as JSON."""
TOOL_CALL = pa.struct(
    [
        ("call_index", pa.int32()),
        ("tool", pa.string()),
        ("caller", pa.string()),
        ("parents", pa.list_(pa.int32())),
        ("request", pa.string()),
        ("response", pa.string()),
        ("error", pa.string()),
        ("start_s", pa.float64()),
        ("duration_s", pa.float64()),
        ("num_attempts", pa.int32()),
        ("version", pa.string()),
    ]
)
EPISODES = pa.schema(
    [
        pa.field("episode_id", pa.string(), nullable=False, metadata=KEY_METADATA),
        ("run_id", pa.string()),
        ("iteration", pa.int32()),
        ("purpose", pa.string()),
        ("team_key", pa.string()),
        ("task_id", pa.string()),
        ("source", pa.string()),
        ("status", pa.string()),
        ("agents", pa.string()),  # "|solver|verifier|", so that a filter reaches what is nested in `turns`
        ("model_groups", pa.string()),
        ("num_turns", pa.int32()),
        ("workflow", pa.string()),
        ("group_id", pa.string()),
        ("episode_index", pa.int32()),
        ("variant", pa.string()),
        ("seed", pa.int64()),
        ("stop_reason", pa.string()),
        ("error", pa.string()),
        ("answer", pa.string()),
        ("is_version_mixed", pa.bool_()),
        ("started_at", pa.float64()),
        ("duration_s", pa.float64()),
        ("attempt", pa.int32()),
        ("cause", pa.string()),
        ("task_prompt", pa.string()),
        ("task_answers", pa.list_(pa.string())),
        ("task_metadata", pa.string()),
        ("outcome_metadata", pa.string()),
        ("policy_versions", pa.string()),
        ("turns", pa.list_(TURN)),
        ("tool_calls", pa.list_(TOOL_CALL)),
    ]
)
LISTED = tuple(name for name in EPISODES.names if name not in ("turns", "tool_calls", "task_metadata"))
"""The columns that a list of episodes has: those that are small."""
TURN_REWARD = pa.struct(
    [
        ("turn_index", pa.int32()),
        ("agent", pa.string()),
        ("model_group", pa.string()),
        ("reward", pa.float64()),
        ("breakdown", pa.string()),
    ]
)
REWARDS = pa.schema(
    [
        pa.field("reward_id", pa.string(), nullable=False, metadata=KEY_METADATA),
        ("episode_id", pa.string()),
        ("run_id", pa.string()),
        ("iteration", pa.int32()),
        ("purpose", pa.string()),
        ("credit_version", pa.string()),
        ("outcome", pa.float64()),
        ("rewards", pa.list_(TURN_REWARD)),
    ]
)


def episode_table(traces: Sequence[Trace]) -> pa.Table:
    """Returns rows of the `episodes` table, one per trace, in order."""
    turns = [turn for trace in traces for turn in trace.turns]
    calls = [call for trace in traces for call in trace.tool_calls]
    sampling = _struct_array(SAMPLING, [turn.sampling for turn in turns])
    turn_array = _struct_array(
        TURN, turns, sampling=sampling, **{name: [_dump(getattr(t, name)) for t in turns] for name in TURN_JSON}
    )
    call_array = _struct_array(
        TOOL_CALL, calls, request=[_dump(c.request) for c in calls], response=[_dump(c.response) for c in calls]
    )
    columns = {
        "task_id": [t.task.task_id for t in traces],
        "source": [t.task.source for t in traces],
        "agents": [_tags(turn.agent for turn in t.turns) for t in traces],
        "model_groups": [_tags(turn.model_group for turn in t.turns) for t in traces],
        "num_turns": [len(t.turns) for t in traces],
        "task_prompt": [t.task.prompt for t in traces],
        "task_answers": [t.task.answers for t in traces],
        "task_metadata": [_dump(t.task.metadata) for t in traces],
        "outcome_metadata": [_dump(t.outcome_metadata) for t in traces],
        "policy_versions": [_dump(t.policy_versions) for t in traces],
        "turns": _nest(turn_array, [len(t.turns) for t in traces]),
        "tool_calls": _nest(call_array, [len(t.tool_calls) for t in traces]),
    }
    return pa.Table.from_arrays(_arrays(EPISODES, traces, columns), schema=EPISODES)


def traces_of(batch: pa.RecordBatch) -> Iterator[Trace]:
    """Yields the records of whole rows of the `episodes` table: the inverse of `episode_table`."""
    flat = [f.name for f in fields(Trace) if f.name in batch.schema.names and f.name not in ("turns", "tool_calls")]
    columns = {name: batch[name].to_pylist() for name in flat}
    columns["purpose"] = [Purpose(v) for v in columns["purpose"]]
    columns["status"] = [EpisodeStatus(v) for v in columns["status"]]
    if "cause" in columns:  # a table of an earlier version has none
        columns["cause"] = [Cause(v) for v in columns["cause"]]
    for name in ("outcome_metadata", "policy_versions"):
        columns[name] = [json.loads(v) for v in columns[name]]
    columns["turns"] = _unnest(batch["turns"], _turns)
    columns["tool_calls"] = _unnest(batch["tool_calls"], _tool_calls)
    columns["task"] = _records(
        Task,
        {
            "task_id": batch["task_id"].to_pylist(),
            "prompt": batch["task_prompt"].to_pylist(),
            "answers": [tuple(v) for v in batch["task_answers"].to_pylist()],
            "source": batch["source"].to_pylist(),
            "metadata": [json.loads(v) for v in batch["task_metadata"].to_pylist()],
        },
    )
    yield from _records(Trace, columns)


def reward_table(rewards: Sequence[EpisodeRewards]) -> pa.Table:
    """Returns rows of the `rewards` table, one per episode and credit version, in order."""
    parts = [part for episode in rewards for part in episode.rewards]
    part_array = _struct_array(TURN_REWARD, parts, breakdown=[_dump(p.breakdown) for p in parts])
    columns = {
        "reward_id": [reward_id(r) for r in rewards],
        "rewards": _nest(part_array, [len(r.rewards) for r in rewards]),
    }
    return pa.Table.from_arrays(_arrays(REWARDS, rewards, columns), schema=REWARDS)


def rewards_of(batch: pa.RecordBatch) -> Iterator[EpisodeRewards]:
    """Yields the records of whole rows of the `rewards` table: the inverse of `reward_table`."""
    flat = [f.name for f in fields(EpisodeRewards) if f.name != "rewards"]
    columns = {name: batch[name].to_pylist() for name in flat}
    columns["purpose"] = [Purpose(v) for v in columns["purpose"]]
    columns["rewards"] = _unnest(batch["rewards"], _turn_rewards)
    yield from _records(EpisodeRewards, columns)


def reward_id(rewards: EpisodeRewards) -> str:
    """Returns the key of a reward row: one per episode and credit version."""
    return f"{rewards.episode_id}/{rewards.credit_version}"


def _turns(array: pa.StructArray) -> list[Turn]:
    columns = _columns(array, as_tuples=("parents", "prompt_token_ids", "completion_token_ids", "rollout_logprobs"))
    columns["sampling"] = _sampling(array.field("sampling"))
    columns["finish_reason"] = [FinishReason(v) for v in columns["finish_reason"]]
    for name in TURN_JSON:
        if name in columns:  # a table of an earlier version lacks the later ones
            columns[name] = [json.loads(v) for v in columns[name]]
    return _records(Turn, columns)


def _sampling(array: pa.StructArray) -> list[Sampling]:
    """Converts sampling settings; equal ones share one record, because there are few of them and many turns."""
    names = [f.name for f in array.type]  # a table of an earlier version has no `constraint`
    known: dict[tuple[Any, ...], Sampling] = {}
    keys = list(zip(*(array.field(name).to_pylist() for name in names), strict=True))
    for key in keys:
        if key not in known:
            known[key] = Sampling(**dict(zip(names, key, strict=True)))
    return [known[key] for key in keys]


def _tool_calls(array: pa.StructArray) -> list[ToolCall]:
    columns = _columns(array, as_tuples=("parents",))
    for name in ("request", "response"):
        columns[name] = [json.loads(v) for v in columns[name]]
    return _records(ToolCall, columns)


def _turn_rewards(array: pa.StructArray) -> list[TurnReward]:
    columns = _columns(array)
    columns["breakdown"] = [json.loads(v) for v in columns["breakdown"]]
    return _records(TurnReward, columns)


def _columns(array: pa.StructArray, as_tuples: Sequence[str] = ()) -> dict[str, list[Any]]:
    names = [f.name for f in array.type]
    return {name: (_tuples if name in as_tuples else pa.Array.to_pylist)(array.field(name)) for name in names}


def _records(record: type[R], columns: Mapping[str, Sequence[Any]]) -> list[R]:
    names = list(columns)
    return [record(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _tuples(array: pa.ListArray) -> list[tuple[Any, ...]]:
    offsets, values = _spread(array)
    flat = tuple(values.to_numpy(zero_copy_only=False).tolist())
    return [flat[a:b] for a, b in pairwise(offsets)]


def _unnest(array: pa.ListArray, decode: Any) -> list[tuple[Any, ...]]:
    offsets, values = _spread(array)
    flat = tuple(decode(values))
    return [flat[a:b] for a, b in pairwise(offsets)]


def _spread(array: pa.ListArray) -> tuple[list[int], pa.Array]:
    """Returns offsets from zero and only the values of this slice: a batch may share its buffers with bigger ones."""
    offsets = array.offsets.to_numpy()
    return (offsets - offsets[0]).tolist(), array.values.slice(offsets[0], offsets[-1] - offsets[0])


def _nest(values: pa.Array, counts: Sequence[int]) -> pa.ListArray:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _struct_array(kind: pa.StructType, records: Sequence[Any], **columns: Any) -> pa.StructArray:
    return pa.StructArray.from_arrays(_arrays(kind, records, columns), fields=list(kind))


def _arrays(
    kind: pa.Schema | pa.StructType, records: Sequence[Any], columns: Mapping[str, Sequence[Any] | pa.Array]
) -> list[pa.Array]:
    """Builds one array per field, from `columns`, or else from the attribute of that name."""
    arrays = []
    for field in kind:
        values = columns[field.name] if field.name in columns else [getattr(r, field.name) for r in records]
        arrays.append(values if isinstance(values, pa.Array) else _array(values, field.type))
    return arrays


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (
        UnicodeEncodeError
    ):  # json.loads makes half a surrogate pair of what a model wrote: it is stored as its escape
        return pa.array([v.encode(errors="backslashreplace").decode() for v in values], kind)


def _tags(names: Iterable[str]) -> str:
    return "".join(f"|{name}" for name in dict.fromkeys(names)) + "|"


def _dump(value: Any) -> str:
    """Returns JSON; values that JSON does not have are stored as their repr, so that no tool's answer loses an episode."""
    try:
        return json.dumps(value if not isinstance(value, Mapping) else dict(value), ensure_ascii=False, default=repr)
    except Exception:  # noqa: BLE001 - a key that is no string, a cycle, a repr that raises: these are a user's objects
        if isinstance(value, Mapping):
            return json.dumps({k if isinstance(k, str) else _repr(k): _repr(v) for k, v in value.items()})
        return json.dumps(_repr(value))


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - any class may define one
        return f"<{type(value).__name__}>"
