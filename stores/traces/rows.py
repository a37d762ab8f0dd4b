"""rows: records <-> Arrow rows, one episode per row with its turns and tool calls nested.

    Trace ── episode_table ──> pyarrow.Table ── LanceDB ──> RecordBatch ── traces_of ──> Trace

The schema is the record: every column is derived from the type of a field of `stores/types.py`.

    int, float, bool          int64, float64, bool      what free form has (mappings, Any)   JSON
    str, enums                string                    a dataclass                          a struct
    tuple, Sequence of these  a list, of int32 and float32 where it holds numbers: token ids and logprobs (which come back rounded)

Whole columns are converted at once: nothing here runs once per token. Sequences come back as tuples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa

from stores.types import EpisodeRewards, Task, Trace

R = TypeVar("R")

KEY_METADATA = {b"lance-schema:unenforced-primary-key:position": b"1"}
"""Declares the primary key with the table itself. Without it two concurrent merges of one key insert it twice."""
SCALARS = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
ITEMS = {int: pa.int32(), float: pa.float32()}
"""Numbers of lists, of which there is one per token."""


@cache
def hints(record: Any) -> dict[str, Any]:
    """Returns the types of a record's fields, by name and without `| None`: every column may have nulls."""
    return {name: _without_none(hint) for name, hint in get_type_hints(record).items() if name in _names(record)}


def arrow_type(hint: Any) -> pa.DataType:
    """Returns the Arrow type of a field's type, see above."""
    if _is_record(hint):
        return pa.struct([(name, arrow_type(of_field)) for name, of_field in hints(hint).items()])
    if item := _item(hint):
        return pa.list_(ITEMS.get(item) or arrow_type(item))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return pa.string()
    return SCALARS.get(hint, pa.string())


def _schema(record: Any, key: str, **more: pa.DataType) -> pa.Schema:
    """Returns the columns of a record's table: its own, those of its task, and `more`."""
    own = {name: arrow_type(hint) for name, hint in hints(record).items() if hint is not Task}
    task = {_task_column(name): arrow_type(hint) for name, hint in hints(Task).items()} if record is Trace else {}
    columns = {**own, **task, **more}
    return pa.schema(
        [pa.field(name, kind, name != key, KEY_METADATA if name == key else None) for name, kind in columns.items()]
    )


def _task_column(name: str) -> str:
    return name if name.startswith("task_") else f"task_{name}"


def _is_record(hint: Any) -> bool:
    return is_dataclass(hint)


def _names(record: Any) -> list[str]:
    return [field.name for field in fields(record)]


def _without_none(hint: Any) -> Any:
    others = [arg for arg in get_args(hint) if arg is not type(None)]
    return others[0] if get_origin(hint) is UnionType and len(others) == 1 else hint


def _item(hint: Any) -> Any:
    """Returns the type of what a tuple or a sequence holds; None for other types."""
    return get_args(hint)[0] if get_origin(hint) in (tuple, Sequence) else None


EPISODES = _schema(
    Trace,
    "episode_id",
    agents=pa.string(),  # "|solver|verifier|", so that a filter reaches what is nested in `turns`
    model_groups=pa.string(),
    num_turns=pa.int32(),
)
REWARDS = _schema(EpisodeRewards, "reward_id", reward_id=pa.string())
LISTED = tuple(name for name in EPISODES.names if name not in ("turns", "tool_calls", "task_metadata"))
"""The columns that a list of episodes has: those that are small."""


def episode_table(traces: Sequence[Trace]) -> pa.Table:
    """Returns rows of the `episodes` table, one per trace, in order."""
    tasks = [trace.task for trace in traces]
    columns = {
        **{name: encoded([getattr(t, name) for t in traces], hint) for name, hint in _own(Trace).items()},
        **{_task_column(n): encoded([getattr(t, n) for t in tasks], hint) for n, hint in hints(Task).items()},
        "agents": [_tags(turn.agent for turn in t.turns) for t in traces],
        "model_groups": [_tags(turn.model_group for turn in t.turns) for t in traces],
        "num_turns": [len(t.turns) for t in traces],
    }
    return pa.table(columns, schema=EPISODES)


def traces_of(batch: pa.RecordBatch) -> Iterator[Trace]:
    """Yields the records of whole rows of the `episodes` table: the inverse of `episode_table`."""
    columns = {name: decoded(batch[name], hint) for name, hint in _own(Trace).items()}
    task = {name: decoded(batch[_task_column(name)], hint) for name, hint in hints(Task).items()}
    yield from _records(Trace, columns | {"task": _records(Task, task)})


def reward_table(rewards: Sequence[EpisodeRewards]) -> pa.Table:
    """Returns rows of the `rewards` table, one per episode and credit version, in order."""
    columns = {n: encoded([getattr(r, n) for r in rewards], hint) for n, hint in hints(EpisodeRewards).items()}
    return pa.table(columns | {"reward_id": [reward_id(r) for r in rewards]}, schema=REWARDS)


def rewards_of(batch: pa.RecordBatch) -> Iterator[EpisodeRewards]:
    """Yields the records of whole rows of the `rewards` table: the inverse of `reward_table`."""
    columns = {name: decoded(batch[name], hint) for name, hint in hints(EpisodeRewards).items()}
    yield from _records(EpisodeRewards, columns)


def reward_id(rewards: EpisodeRewards) -> str:
    """Returns the key of a reward row: one per episode and credit version."""
    return f"{rewards.episode_id}/{rewards.credit_version}"


def encoded(values: Sequence[Any], hint: Any) -> pa.Array:
    """Returns the values of a field as an array of `arrow_type(hint)`."""
    kind = arrow_type(hint)
    if _is_record(hint):
        parts = [encoded([getattr(v, name) for v in values], of_field) for name, of_field in hints(hint).items()]
        return pa.StructArray.from_arrays(parts, fields=list(kind))
    if _is_record(item := _item(hint)):
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), encoded([v for row in values for v in row], item))
    if _is_json(hint):
        values = [_dump(v) for v in values]
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        # json.loads makes half a surrogate pair of what a model wrote: it is stored as its escape
        return pa.array(_escaped(values), kind)


def decoded(array: pa.Array, hint: Any) -> list[Any]:
    """Returns the values of a field: the inverse of `encoded`."""
    if _is_record(hint):
        return _records(hint, {name: decoded(array.field(name), h) for name, h in hints(hint).items()})
    if item := _item(hint):
        return _tuples(array, item)
    values = array.to_pylist()
    if _is_json(hint):
        return [json.loads(v) for v in values]
    return list(map(hint, values)) if issubclass(hint, StrEnum) else values


def _own(record: Any) -> dict[str, Any]:
    """Returns the fields that are columns of the same name."""
    return {name: hint for name, hint in hints(record).items() if hint is not Task}


def _is_json(hint: Any) -> bool:
    return hint not in SCALARS and _item(hint) is None and not (isinstance(hint, type) and issubclass(hint, StrEnum))


def _records(record: type[R], columns: Mapping[str, Sequence[Any]]) -> list[R]:
    return [record(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _tuples(array: pa.ListArray, item: Any) -> list[tuple[Any, ...]]:
    """Returns the lists of an array, of its own slice only: a batch may share its buffers with bigger ones."""
    offsets = array.offsets.to_numpy()
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    flat = tuple(values.to_numpy().tolist() if item in ITEMS else decoded(values, item))
    return [flat[a:b] for a, b in pairwise((offsets - offsets[0]).tolist())]


def _tags(names: Iterable[str]) -> str:
    return "".join(f"|{name}" for name in dict.fromkeys(names)) + "|"


def _dump(value: Any) -> str:
    """Returns JSON; values that JSON does not have are stored as their repr, so that no tool's answer loses an episode."""
    try:
        if not _has_equal_keys(value):
            return json.dumps(value, ensure_ascii=False, default=_as_json)
    except Exception:  # noqa: BLE001 - a key that is no string, a cycle, a repr that raises: these are a user's objects
        pass
    if not isinstance(value, Mapping):
        return json.dumps(_repr(value))
    texts = {k if isinstance(k, str) else _repr(k): _repr(v) for k, v in value.items()}
    return json.dumps(texts if len(texts) == len(value) else {_repr(k): _repr(v) for k, v in value.items()})


def as_stored(value: Any) -> Any:
    """Returns a field of any JSON as it is read again: tuples are lists, and keys are texts."""
    return json.loads(_dump(value))


def _as_json(value: Any) -> Any:
    """Returns what JSON writes for an object that it does not know: numbers of NumPy are numbers, and any mapping is an object."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _has_equal_keys(value: Any) -> bool:
    """Returns whether two keys of a mapping in it would be one in JSON, as 1 and "1"."""
    if isinstance(value, Mapping):
        names = {k if isinstance(k, str) else json.dumps(k) for k in value}
        return len(names) < len(value) or any(map(_has_equal_keys, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_equal_keys, value))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return [*map(_escaped, value)] if isinstance(value, list | tuple) else value


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - any class may define one
        return f"<{type(value).__name__}>"
