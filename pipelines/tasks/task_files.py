"""task_files: a JSON, JSONL or Parquet file -> its rows one after another, each with its location.

A file may be larger than memory: only a few rows are in memory at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import pyarrow

PARQUET_ROWS = 64
PARQUET_BYTES = 4 << 20
"""Decoded at once, the rows or the bytes, whichever are less; a row of hidden tests may have megabytes."""
MAX_DEPTH = 200
"""Greatest depth of nested brackets in JSON."""

_BRACKETS = {"start_map": 1, "start_array": 1, "end_map": -1, "end_array": -1}


class RepeatedKeyError(ValueError):
    """Says that one object of a task file has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:60]!r} stands twice in one object: keep the value that is meant")


def read_rows(path: Path, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (location, row) of every row. Raises ValueError, with file and line, if the content does not match the suffix."""
    readers = {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _json, ".parquet": _parquet}
    if path.suffix not in readers:
        raise ValueError(f"{place}: {path} has an unknown suffix: use one of {', '.join(readers)}")
    if not path.is_file():
        raise ValueError(f"{place}: task file {path} does not exist (seen from {Path.cwd()})")
    for at, row in readers[path.suffix](path):
        if not isinstance(row, dict):
            raise ValueError(f"{at}: a task is a JSON object, this is {type(row).__name__}: {str(row)[:60]!r}")
        yield at, row


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                at = f"{path}:{number}"
                try:
                    yield at, json.loads(line.decode("utf-8-sig"), object_pairs_hook=_without_repeats)
                except UnicodeDecodeError as error:
                    raise ValueError(f"{at}: not UTF-8: {error}") from None
                except RepeatedKeyError as error:
                    raise ValueError(f"{at}: {error}") from None
                except (ValueError, RecursionError) as error:  # too many digits, too many brackets
                    raise ValueError(f"{at}: not JSON ({error}): {line[:60].decode(errors='replace')!r}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these pairs; RepeatedKeyError where two have one key, of which `json` would take the last."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise RepeatedKeyError(name)
        members[name] = value
    return members


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    import ijson

    number = 0
    try:
        with path.open("rb") as file:
            if file.read(3) != b"\xef\xbb\xbf":
                file.seek(0)
            for number, row in enumerate(_items(file), 1):
                yield f"{path}: item {number}", row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    except RepeatedKeyError as error:
        raise ValueError(f"{path}: item {number + 1}: {error}") from None
    except (ijson.JSONError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ValueError(
            f"{path}: not JSON after item {number} ({message}); one object per line is called .jsonl"
        ) from None
    if number == 0:
        with path.open("rb") as file:
            if file.read(64).strip()[:1] not in (b"[", b""):
                raise ValueError(f"{path}: holds no list, a task file holds a list of objects")


def _items(file: BinaryIO) -> Iterator[Any]:
    """Yields the items of a list, or of the list `data` of an object. ijson's own `items` holds the path to its position, whose length
    is not bounded."""
    import ijson

    depth, key, builder = 0, "", ijson.ObjectBuilder()
    of_list: int | None = None  # the depth of the list's items
    keys: list[set[str]] = []
    # Without use_float, which refuses integers of more than 64 bits, ijson 3.6 dies (SIGSEGV) of one of 5000 digits.
    for event, value in ijson.basic_parse(file, use_float=True):
        change = _BRACKETS.get(event, 0)
        depth += change
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} brackets within one another")
        if event == "start_map":
            keys.append(set())
        elif event == "end_map":
            keys.pop()
        elif event == "map_key":
            if value in keys[-1]:
                raise RepeatedKeyError(value)
            keys[-1].add(value)
            key = value if depth == 1 else key
        if of_list is None and event == "start_array" and (depth == 1 or (depth == 2 and key == "data")):
            of_list = depth
        elif of_list is not None and depth >= of_list:
            builder.event(event, value)
            if depth == of_list:
                yield builder.value
                builder = ijson.ObjectBuilder()
        elif of_list is not None:  # behind it
            of_list = None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        _without_repeats([(name, None) for name in file.schema_arrow.names])
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group)
            rows = PARQUET_BYTES * size.num_rows // max(size.total_byte_size, 1)
            few = min(max(rows, 1), PARQUET_ROWS)
            # With threads the peak depends on what else the machine does: 10,000 rows took 127 to 145 MiB in the whole suite.
            batches = file.iter_batches(batch_size=few, row_groups=[group], use_threads=False)
            while (batch := next(batches, None)) is not None:
                decoded = _in_doubles(batch).to_pylist(maps_as_pydicts="strict")
                del batch  # otherwise it stays in memory while the next is decoded
                for row in decoded:
                    number += 1
                    yield f"{path}: row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not Parquet after row {number}: {error}") from None
    except (ValueError, KeyError) as error:  # a name that stands twice, in a row, an object or a map
        raise ValueError(f"{path}: after row {number}: {error.args[0]}") from None


def _in_doubles(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Returns a batch whose numbers of 32 bits read as they were written: 0.1, where a plain cast gives 0.10000000149011612."""
    import pyarrow

    schema = batch.schema
    if all(_with_singles_as(field.type, pyarrow.string()) == field.type for field in schema):
        return batch
    for kind in (pyarrow.string(), pyarrow.float64()):
        fields = [field.with_type(_with_singles_as(field.type, kind)) for field in schema]
        batch = batch.cast(pyarrow.schema(fields))
    return batch


def _with_singles_as(type_: pyarrow.DataType, kind: pyarrow.DataType) -> pyarrow.DataType:
    """Returns a type in which each float of 32 bits is `kind`, also in lists, maps and objects."""
    import pyarrow
    from pyarrow import types

    if types.is_float32(type_):
        return kind
    if types.is_struct(type_):
        return pyarrow.struct([field.with_type(_with_singles_as(field.type, kind)) for field in type_])
    if types.is_map(type_):
        return pyarrow.map_(type_.key_type, _with_singles_as(type_.item_type, kind))
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        inner = _with_singles_as(type_.value_type, kind)
        return type_ if inner == type_.value_type else pyarrow.large_list(inner)
    return type_
