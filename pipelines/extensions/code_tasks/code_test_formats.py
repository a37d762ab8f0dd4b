"""code_test_formats: the tests of a code task as a data set writes them -> pairs of input and output.

`read_pairs` reads these forms. The order matters: an object of the earlier ones may have fields of the later ones, too.

    split     {"public_tests": ..., "private_tests": ..., "tests": ...}   CodeContests, LiveCodeBench, UnityMAS-O;
              with CodeContests' `generated_tests`, which are private
    columns   {"inputs": [...], "outputs": [...]}                         TACO, APPS
    single    {"input": ..., "output": ...}
    list      [{"input": ..., "output": ...}, ...]                        DeepCoder, LiveCodeBench's lists

The parts of a split are again in any of the forms. All of it may be JSON text, and LiveCodeBench packs its private tests.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
import zlib
from collections.abc import Mapping, Sequence
from json import JSONDecodeError
from typing import Any, NamedTuple

from serve_apps.chat import long_json
from serve_apps.tools.reference_fields import (
    OUTPUT,
    OUTPUTS,
    PRIVATE_TESTS,
    PUBLIC_TESTS,
    SPLIT_TEST_FIELDS,
    TEST_FIELDS,
)

INPUT, INPUTS = ("input", "stdin", "given"), ("inputs", "input", "stdin")
"""Fields of what a program reads: in a single test, and in a column of them."""
MAX_UNPACKED_BYTES = 256 << 20

_PARTS = (*TEST_FIELDS, *SPLIT_TEST_FIELDS)
"""Fields that hold tests, in any of the forms again."""
_UNPACKING_ERRORS = (
    *(binascii.Error, zlib.error, pickle.UnpicklingError, ValueError, EOFError),
    *(LookupError, AttributeError, TypeError, OverflowError, MemoryError),  # what bytes that are no pickle lead to
)

Pair = tuple[Any, Any]
"""The input and the output, as the data set has them."""


class Pairs(NamedTuple):
    """Holds the tests of a task. Tests that a data set does not divide are private."""

    public: list[Pair]
    private: list[Pair]


def read_pairs(data: Any) -> Pairs:
    """Reads the tests in data that `opened` returned; ValueError where they have no known form, or a test lacks a part."""
    if isinstance(data, Mapping):
        if any(data.get(field) for field in _PARTS):
            return _read_split(data)
        inputs, outputs = _field(data, INPUTS), _field(data, OUTPUTS)
        is_columns = all(isinstance(column, Sequence) and not isinstance(column, str) for column in (inputs, outputs))
        return _read_columns(inputs, outputs) if is_columns else _read_list([data])
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return _read_list(data)
    raise ValueError(f"tests are a list or an object, this is {type(data).__name__}")


def opened(raw: Any) -> Any:
    """Parses JSON text and unpacks packed tests at every level down to the cases."""
    data = _parsed(raw)
    if not isinstance(data, Mapping):
        return data
    return {**data, **{f: opened(data[f]) for f in _PARTS if data.get(f)}}


def is_plain(data: Any) -> bool:
    """Returns whether no part of tests is a text that is to be parsed or unpacked: a short one may unpack to hundreds of MB."""
    if isinstance(data, Mapping):
        return all(is_plain(data[f]) for f in (*_PARTS, "metadata") if data.get(f))
    return is_plain(data[0]) if isinstance(data, list) and data else not isinstance(data, (str, bytes))


def _parsed(raw: Any) -> Any:
    """Returns the data in JSON text and LiveCodeBench's packing, which may be wrapped in one another up to four times."""
    for _ in range(4):
        if not isinstance(raw, (str, bytes)):
            return raw
        try:
            raw = long_json.loads(raw)
        except (JSONDecodeError, UnicodeDecodeError):
            raw = _unpacked(raw)
    return raw


def _unpacked(raw: str | bytes) -> Any:
    """Reads base64(zlib(pickle(text))); only text is unpickled, so that no code can run."""
    try:
        packed = base64.b64decode(raw, validate=True)
        data = zlib.decompressobj().decompress(packed, MAX_UNPACKED_BYTES)
        return _TextOnly(io.BytesIO(data)).load()
    except _UNPACKING_ERRORS as error:
        raise ValueError(f"neither JSON nor packed tests ({error}): {str(raw[:60])!r}") from None


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"packed tests name {module}.{name}: only text is read")


def enclosing_objects(data: Any) -> list[Mapping[str, Any]]:
    """Returns the objects around the cases, the innermost first: a field beside the tests wins over the same field
    of the row."""
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)) and data and isinstance(data[0], Mapping):
        return enclosing_objects(data[0])
    if not isinstance(data, Mapping):
        return []
    inner = [level for f in _PARTS if data.get(f) for level in enclosing_objects(data[f])]
    try:
        metadata = _parsed(data.get("metadata"))
    except ValueError:  # a text about the tests, not data
        metadata = None
    return [*inner, data, *([metadata] if isinstance(metadata, Mapping) else [])]


def first_value(objects: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Any:
    """Returns the first value of any of these fields that is not empty; None where there is none."""
    return next((level[f] for level in objects for f in fields if level.get(f)), None)


def _read_split(data: Mapping[str, Any]) -> Pairs:
    nested = next((data[field] for field in TEST_FIELDS if data.get(field)), None)
    public, private = ([], []) if nested is None else read_pairs(nested)
    for fields, pairs in ((PUBLIC_TESTS, public), (PRIVATE_TESTS, private)):
        for part in (read_pairs(data[field]) for field in fields if data.get(field)):
            pairs += [*part.public, *part.private]  # the field around them decides
    return Pairs(public, private)


def _read_columns(inputs: Sequence[Any], outputs: Sequence[Any]) -> Pairs:
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs but {len(outputs)} outputs: a test needs both")
    return Pairs([], list(zip(inputs, outputs, strict=True)))


def _read_list(data: Sequence[Any]) -> Pairs:
    pairs = []
    for number, row in enumerate(data, 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"case {number} is {type(row).__name__}, an object with input and output is needed")
        given, expected = _field(row, INPUT), _field(row, OUTPUT)
        if given is None or expected is None:
            raise ValueError(f"case {number} has no {'input' if given is None else 'output'}: {sorted(row)}")
        pairs.append((given, expected))
    return Pairs([], pairs)


def _field(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)
