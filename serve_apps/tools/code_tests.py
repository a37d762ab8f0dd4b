"""code_tests: the tests of a code task, in any shape of the field's data sets -> cases to run, and how they are compared.

TACO ({"inputs", "outputs", "fn_name"}), DeepCoder ([{"input", "output", "type", "metadata"}]), LiveCodeBench (public and
private lists, the private ones packed), CodeContests ({"public_tests": {"input", "output"}}), UnityMAS-O's rows
(seed-systems 1.1.5), each as data or as a JSON string of it.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_apps.tools.checkers import OUTPUT_CHECKERS, is_right_value

NESTED = ("tests", "test_cases", "input_output")
PUBLIC = ("public_tests", "public_test_cases")
PRIVATE = ("private_tests", "private_test_cases")
FN_NAME = ("fn_name", "function_name", "func_name")
CHECKER = ("checker_type", "special_judge")
CHECKER_CODE = ("checker_code", "checker")
CHECKERS = (*OUTPUT_CHECKERS, "custom")
MAX_UNPACKED_BYTES = 256 << 20

_NOT_PACKED = (
    *(binascii.Error, zlib.error, pickle.UnpicklingError, ValueError, EOFError),
    *(LookupError, AttributeError, TypeError, OverflowError, MemoryError),  # what bytes that are no pickle lead to
)
_BATCHED = re.compile(r"\b(?:test\s*cases?|testcases?|tests)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input and what a right program says to it."""

    given: Any
    """Text for standard input, or the list of arguments."""
    expected: Any
    """Text on standard output, or the value returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """What a submission is judged by."""

    cases: tuple[Case, ...]
    public: tuple[Case, ...] = ()
    """Cases that a prompt may show: none of them pays."""
    fn_name: str = ""
    checker: str = "standard"
    checker_code: str = ""
    """Source of `check(given, expected, actual) -> bool`, for the checker `custom`."""


def read_tests(raw: Any, *, place: str, fn_name: str = "") -> CodeTests:
    """The tests in `raw`; cases that are both public and private count as public only.

    Raises ValueError, naming `place`, where there is no case that pays, where a program that says nothing passes them
    all, where two cases with the same input expect different outputs, and where a shape is not known.
    """
    try:
        return _read(_opened(raw), fn_name)
    except RecursionError:
        raise ValueError(f"{place}: tests are nested too deeply to be read: {str(raw)[:60]!r}") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def expand_batched(tests: CodeTests, statement: str, *, place: str = "tests") -> CodeTests:
    """The tests as a task with this statement needs them: batches taken apart, and nothing that is shown pays.

    Cases of `t` one-line tests each are taken apart, so that a program that is right on some of them shows it: only where
    the statement speaks of test cases, the first line of the input is t, exactly t lines follow, t lines are expected
    (seed-systems 1.1.5), and the parts agree with one another. A case whose input and, further on, output stand in the
    statement as lines of their own is public, whatever the data set calls it.

    Raises ValueError, naming `place`, where this leaves no case that pays.
    """
    if tests.fn_name:
        return tests
    text = _block(statement)
    public = [*tests.public, *(case for case in tests.cases if _stands_in(case.given, case.expected, text))]
    hidden = list(tests.cases)
    if _BATCHED.search(statement) and tests.checker != "custom":
        apart = [[part for case in cases for part in _taken_apart(case)] for cases in (public, hidden)]
        if _contradiction([*apart[0], *apart[1]], tests.checker, is_call=False) is None:
            public = apart[0]
            hidden = [c for c in apart[1] if not _stands_in(c.given.removeprefix("1\n"), c.expected, text)]
    shown = {_key(case) for case in public}
    hidden = [case for case in hidden if _key(case) not in shown]
    try:
        _check_pays(hidden, tests.checker)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return replace(tests, cases=tuple(_once(hidden)), public=tuple(_once(public)))


def _read(data: Any, fn_name: str) -> CodeTests:
    around = _around(data)
    name = fn_name or str(_said(around, FN_NAME) or "")
    checker, code = _checker(around)
    public, private = _cases(data, bool(name))
    clash = _contradiction([*public, *private], checker, is_call=bool(name))
    if clash is not None:
        given, *outputs = (str(part)[:60] for part in clash)
        raise ValueError(
            f"two cases with the same input {given!r} expect {' and '.join(map(repr, outputs))}: no program passes both; "
            "drop one"
        )
    shown = {_key(case) for case in public}
    hidden = [case for case in private if _key(case) not in shown]
    _check_pays(hidden, checker)
    return CodeTests(
        cases=tuple(_once(hidden)), public=tuple(_once(public)), fn_name=name, checker=checker, checker_code=code
    )


def _check_pays(hidden: Sequence[Case], checker: str) -> None:
    if not hidden:
        raise ValueError(
            "holds no case that is not public, or stands in the statement: a shown test must not pay; give hidden ones"
        )
    if checker != "custom" and all(case.expected is None or str(case.expected).strip() == "" for case in hidden):
        raise ValueError("every hidden case expects nothing: a program that says nothing would pass; give other ones")


def _taken_apart(case: Case) -> list[Case]:
    first, *lines = case.given.strip().splitlines() or [""]
    expected = case.expected.strip().splitlines()
    if not first.strip().isdecimal() or len(lines) < 2 or not first.strip() == str(len(lines)) == str(len(expected)):
        return [case]
    return [Case(given=f"1\n{line}\n", expected=f"{said}\n") for line, said in zip(lines, expected, strict=True)]


def _stands_in(given: str, expected: str, text: str) -> bool:
    """Whether input and then output are whole lines of `text`, one after another."""
    start = text.find(_block(given))
    return start >= 0 and text.find(_block(expected), start + len(_block(given)) - 1) >= 0


def _block(text: str) -> str:
    """Its lines that are not blank, each between line ends."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n" + "".join(f"{line}\n" for line in lines)


def _opened(raw: Any) -> Any:
    """Data all the way down to the cases."""
    data = _parsed(raw)
    if not isinstance(data, Mapping):
        return data
    return {**data, **{f: _opened(data[f]) for f in (*NESTED, *PUBLIC, *PRIVATE) if data.get(f)}}


def _parsed(raw: Any) -> Any:
    """Data, out of JSON strings and LiveCodeBench's packing, as often as they are wrapped."""
    for _ in range(4):
        if not isinstance(raw, (str, bytes)):
            return raw
        try:
            raw = json.loads(raw)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raw = _unpacked(raw)
    return raw


def _unpacked(raw: str | bytes) -> Any:
    """base64(zlib(pickle(text))), read without the power of pickle to run code."""
    try:
        packed = base64.b64decode(raw, validate=True)
        data = zlib.decompressobj().decompress(packed, MAX_UNPACKED_BYTES)
        return _TextOnly(io.BytesIO(data)).load()
    except _NOT_PACKED as error:
        raise ValueError(f"neither JSON nor packed tests ({error}): {str(raw[:60])!r}") from None


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"packed tests name {module}.{name}: only text is read")


def _around(data: Any) -> list[Mapping[str, Any]]:
    """The objects around the cases, the innermost first: what is said at the tests wins over what is said at the row."""
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)) and data and isinstance(data[0], Mapping):
        return _around(data[0])
    if not isinstance(data, Mapping):
        return []
    inner = [level for f in (*NESTED, *PUBLIC, *PRIVATE) if data.get(f) for level in _around(data[f])]
    try:
        beside = _parsed(data.get("metadata"))
    except ValueError:  # words about the tests
        beside = None
    return [*inner, data, *([beside] if isinstance(beside, Mapping) else [])]


def _said(around: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> Any:
    return next((level[f] for level in around for f in fields if level.get(f)), None)


def _checker(around: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    code = str(_said(around, CHECKER_CODE) or "")
    named = _said(around, CHECKER) or "auto"
    name = str(named).strip().lower()
    if name == "auto":
        name = "custom" if code else "standard"
    elif named is True or name in ("true", "custom_checker"):
        name = "custom"
    if name not in CHECKERS:
        raise ValueError(f"checker {name!r} is not known: use one of {', '.join(CHECKERS)}")
    if (name == "custom") != bool(code):
        wrong = "has no checker_code: give it" if name == "custom" else "comes with checker_code: drop one of the two"
        raise ValueError(f"checker {name!r} {wrong}")
    return name, code


def _cases(data: Any, is_call: bool) -> tuple[list[Case], list[Case]]:
    """(public, private); cases that are not told apart are private."""
    if isinstance(data, Mapping):
        together = next((data[f] for f in NESTED if data.get(f)), None)
        shown = [data[f] for f in PUBLIC if data.get(f)]
        hidden = [data[f] for f in PRIVATE if data.get(f)]
        if together or shown or hidden:
            public, private = _cases(together, is_call) if together else ([], [])
            public += [case for part in shown for cases in _cases(part, is_call) for case in cases]
            private += [case for part in hidden for cases in _cases(part, is_call) for case in cases]
            return public, private
        inputs, outputs = _first(data, "inputs", "input", "stdin"), _first(data, "outputs", "output", "stdout")
        if isinstance(inputs, Sequence) and isinstance(outputs, Sequence) and not isinstance(inputs, str):
            if len(inputs) != len(outputs):
                raise ValueError(f"{len(inputs)} inputs but {len(outputs)} outputs: a test needs both")
            return [], [_case(i, o, is_call) for i, o in zip(inputs, outputs, strict=True)]
        data = [data]
    if not isinstance(data, Sequence) or isinstance(data, (str, bytes)):
        raise ValueError(f"tests are a list or an object, this is {type(data).__name__}")
    cases = []
    for number, row in enumerate(data, 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"case {number} is {type(row).__name__}, an object with input and output is needed")
        given, expected = _first(row, "input", "stdin", "given"), _first(row, "output", "stdout", "expected")
        if given is None or expected is None:
            raise ValueError(f"case {number} has no {'input' if given is None else 'output'}: {sorted(row)}")
        cases.append(_case(given, expected, is_call))
    return [], cases


def _first(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _case(given: Any, expected: Any, is_call: bool) -> Case:
    if is_call:
        return Case(given=_arguments(given), expected=_value(expected))
    return Case(given=_text(given), expected=_text(expected))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return "\n".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _arguments(given: Any) -> list[Any]:
    """A list of arguments; of a text each line is one, as JSON."""
    if isinstance(given, str):
        return [_value(line) for line in given.splitlines() if line.strip()]
    return list(given) if isinstance(given, Sequence) else [given]


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _key(case: Case) -> str:
    """Equal for inputs that no program tells apart, or should: text but for space at the ends of lines."""
    if isinstance(case.given, str):
        return "\n".join(line.rstrip() for line in case.given.strip().splitlines())
    return json.dumps(case.given, sort_keys=True, default=str)


def _once(cases: Sequence[Case]) -> list[Case]:
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(_key(case), case)
    return list(first.values())


def _contradiction(cases: Sequence[Case], checker: str, *, is_call: bool) -> tuple[Any, Any, Any] | None:
    """An input with two expectations of which the task's checker accepts neither for the other."""
    if checker == "custom":
        return None
    agree = is_right_value if is_call else OUTPUT_CHECKERS[checker]
    expected: dict[str, Any] = {}
    for case in cases:
        other = expected.setdefault(_key(case), case.expected)
        if not agree(other, case.expected) and not agree(case.expected, other):
            return case.given, other, case.expected
    return None
