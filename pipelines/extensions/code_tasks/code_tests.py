"""code_tests: the tests of a code task, in any data set's format -> cases to run, and how they are compared.

The formats are in `code_test_formats.py`; the rules about which cases pay are here.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from pipelines.extensions.code_tasks.checkers import OUTPUT_CHECKERS, is_right_value
from pipelines.extensions.code_tasks.code_test_formats import enclosing_objects, first_value, opened, read_pairs
from serve_apps.chat import long_json
from serve_apps.tools.reference_fields import CHECKER, CHECKER_CODE, FN_NAME
from stores.syntax_trees import parse_python

CHECKERS = (*OUTPUT_CHECKERS, "custom")
_LONG_INTEGER = re.compile(rf"(?<![\w.])[1-9]\d{{{long_json.MAX_INT_DIGITS},}}+(?![\w.])")
_NAMED = re.compile(r"\s*[A-Za-z_]\w*\s*=(?!=)")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+([a-zA-Z_]\w*+)[\w.]*+(?:[ \t]+as[ \t]+\w+)?[ \t]*$|from[ \t]+([a-zA-Z_]\w*+)[\w.]*+[ \t]+import\b)",
    re.MULTILINE,
)
_BATCHED = re.compile(r"\b(?:test\s*cases?|testcases?|tests)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Holds one input and the output of a right program."""

    given: Any
    """Text for standard input, or the list of arguments; a single object names them. Values are those of `long_json`."""
    expected: Any
    """Text on standard output, or the value returned."""
    names: tuple[str, ...] = field(default=(), compare=False)
    """The names of the arguments where the data set gives them in a text: they go to parameters of these names, and by place
    to a function that has others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """Holds the cases that a submission is judged by."""

    cases: tuple[Case, ...]
    public: tuple[Case, ...] = ()
    """Cases that a prompt may show: they are never judged, so that no reward is paid for them."""
    fn_name: str = ""
    is_in_place: bool = False
    """Whether the function may return None, and is then judged by its first argument, as it has changed it."""
    checker: str = "standard"
    checker_code: str = ""
    """Source of `check(given, expected, actual) -> bool`, for the checker `custom`."""


def read_tests(raw: Any, *, place: str, fn_name: str = "") -> CodeTests:
    """Reads the tests in `raw`; cases that are both public and private count as public only.

    Raises ValueError, naming `place`, where there is no case that pays, where a program that prints nothing passes them
    all, where two cases with the same input expect different outputs, where the inputs are arguments and no function is
    named, and where the format is not known.
    """
    try:
        return _read(opened(raw), fn_name)
    except RecursionError:
        raise ValueError(f"{place}: tests are nested too deeply to be read: {str(raw)[:60]!r}") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def foreign_modules(text: str) -> list[str]:
    """Returns the modules that lines of a text import and that the standard library, all that a sandbox has, lacks."""
    names = {name for match in _IMPORT.finditer(text) for name in match.groups() if name}
    return sorted(names - sys.stdlib_module_names)


def expand_batched(tests: CodeTests, statement: str, *, place: str = "tests") -> CodeTests:
    """Returns the tests of a task with this statement: batches are taken apart, and a case that is shown does not pay.

    Of a function whose signature or statement says that it returns nothing (LeetCode), the changed argument is judged.

    A case of `t` one-line tests is taken apart, so that a program that is right on some of them earns a part. That is done
    only where the statement mentions test cases, the first line of the input is t, exactly t lines follow, t lines are
    expected, and the parts agree with one another. A case whose input and, further on, output stand in the statement as
    lines of their own is public, whatever the data set calls it.

    Raises ValueError, naming `place`, where this leaves no case that pays.
    """
    if tests.fn_name:
        return replace(tests, is_in_place=_returns_nothing(tests.fn_name, statement))
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
    objects = enclosing_objects(data)
    name = fn_name or str(first_value(objects, FN_NAME) or "")
    checker, code = _checker(objects)
    pairs = read_pairs(data)
    if not name and checker != "custom":
        lacking = next((pair for pair in (*pairs.public, *pairs.private) if None in pair), None)
        if lacking is not None:
            raise ValueError(
                f"a case has input {str(lacking[0])[:60]!r} and output {str(lacking[1])[:60]!r}: write a text in the place of null, or "
                "leave the case out"
            )
    orders: dict[frozenset[str], tuple[str, ...]] = {}
    public, private = [[_in_order(_case(*pair, is_call=bool(name)), orders) for pair in part] for part in pairs]
    clash = _contradiction([*public, *private], checker, is_call=bool(name))
    if clash is not None:
        value, *outputs = (str(part)[:60] for part in clash)
        raise ValueError(
            f"two cases with the same input {value!r} expect {' and '.join(map(repr, outputs))}: no program passes both; "
            "drop one"
        )
    shown = {_key(case) for case in public}
    hidden = [case for case in private if _key(case) not in shown]
    _check_pays(hidden, checker)
    if not name and all(_named_values(case.given) is not None for case in hidden):
        raise ValueError(
            f"every input is a list of named arguments like {hidden[0].given[:60]!r}, and no function takes them: give its "
            f"name ({FN_NAME[0]}), or inputs as a program reads them"
        )
    return CodeTests(
        cases=tuple(_once(hidden)), public=tuple(_once(public)), fn_name=name, checker=checker, checker_code=code
    )


def _check_pays(hidden: Sequence[Case], checker: str) -> None:
    if not hidden:
        raise ValueError(
            "holds no case that is not public, or stands in the statement: a shown test must not pay; give hidden ones"
        )
    if checker != "custom" and all(case.expected is None or str(case.expected).strip() == "" for case in hidden):
        raise ValueError("every hidden case expects nothing: a program that prints nothing would pass; give other ones")


def _returns_nothing(fn_name: str, statement: str) -> bool:
    lines = [line.replace(" ", "") for line in statement.splitlines()]
    has_signature = any(line.startswith(f"def{fn_name}(") and line.endswith("->None:") for line in lines)
    return has_signature or "do not return anything" in statement.casefold()


def _taken_apart(case: Case) -> list[Case]:
    first, *lines = case.given.strip().splitlines() or [""]
    expected = case.expected.strip().splitlines()
    if not first.strip().isdecimal() or len(lines) < 2 or not first.strip() == str(len(lines)) == str(len(expected)):
        return [case]
    return [Case(given=f"1\n{line}\n", expected=f"{output}\n") for line, output in zip(lines, expected, strict=True)]


def _stands_in(case_input: str, expected: str, text: str) -> bool:
    """Returns whether input and then output are whole lines of `text`, one after another."""
    start = text.find(_block(case_input))
    return start >= 0 and text.find(_block(expected), start + len(_block(case_input)) - 1) >= 0


def _block(text: str) -> str:
    """Returns the lines of a text that are not blank, each between line ends."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n" + "".join(f"{line}\n" for line in lines)


def _checker(objects: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    code = str(first_value(objects, CHECKER_CODE) or "")
    value = first_value(objects, CHECKER) or "auto"
    name = str(value).strip().lower()
    if name == "auto":
        name = "custom" if code else "standard"
    elif value is True or name in ("true", "custom_checker"):
        name = "custom"
    if name not in CHECKERS:
        raise ValueError(f"checker {name!r} is not known: use one of {', '.join(CHECKERS)}")
    if (name == "custom") != bool(code):
        wrong = "has no checker_code: give it" if name == "custom" else "comes with checker_code: drop one of the two"
        raise ValueError(f"checker {name!r} {wrong}")
    return name, code


def _case(given: Any, expected: Any, *, is_call: bool) -> Case:
    """Makes a case. Arguments and a value that are data stay as they are: a text in them is a text, and no number."""
    if not is_call:
        if isinstance(given, Mapping):
            raise ValueError(
                f"the input {str(given)[:60]!r} is an object, and no function takes it: give its name ({FN_NAME[0]}), or the "
                "text that a program reads"
            )
        return Case(given=_text(given), expected=_text(expected))
    if not isinstance(given, str):
        return Case(given=list(given) if isinstance(given, Sequence) else [given], expected=expected)
    if not _NAMED.match(given):
        return Case(given=[_value(line) for line in given.splitlines() if line.strip()], expected=_value(expected))
    values = _named_values(given)
    if values is None:
        raise ValueError(
            f"the input {given[:60]!r} begins like named arguments and cannot be read as such: write `name = value, ...` with "
            "JSON values (the keys of an object are texts), or one JSON value a line"
        )
    return Case(given=list(values.values()), expected=_literal_or_text(expected), names=tuple(values))


def _in_order(case: Case, orders: dict[frozenset[str], tuple[str, ...]]) -> Case:
    """Returns a case with its named arguments in the order of the first case that has the same names."""
    names = orders.setdefault(frozenset(case.names), case.names)
    if names == case.names:
        return case
    values = dict(zip(case.names, case.given, strict=True))
    return replace(case, given=[values[name] for name in names], names=names)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return "\n".join(map(_text, value))
    return long_json.dumps(value)


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return long_json.loads(text)
    except json.JSONDecodeError:
        return text


def _named_values(text: str) -> dict[str, Any] | None:
    """Returns the values in `nums = [1], k = 2`, on one line or several, by name; None for another text."""
    if not _NAMED.match(text):
        return None
    text, longs = _without_long_integers(text)
    for arguments in (text, ",".join(line.rstrip(" ,") for line in text.splitlines() if line.strip())):
        try:
            call = parse_python(f"f({arguments}\n)", "eval").body
            if isinstance(call, ast.Call) and not call.args and all(keyword.arg for keyword in call.keywords):
                values = {str(k.arg): _literal(k.value, longs, is_argument=True) for k in call.keywords}
                return values if len(values) == len(call.keywords) else None
        except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
            continue
    return None


def _literal_or_text(text: Any) -> Any:
    """Returns the value of JSON text or of Python's; beside named arguments both are in use."""
    value = _value(text)
    if value is not text or not isinstance(text, str):
        return value
    code, longs = _without_long_integers(text)
    try:
        return _literal(parse_python(code.strip(), "eval").body, longs)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        return text


def _without_long_integers(text: str) -> tuple[str, dict[str, str]]:
    """Returns code with names in place of integers that Python's parser refuses for their length, and their digits by name."""
    longs: dict[str, str] = {}
    prefix = "long_"
    while prefix in text:
        prefix += "_"

    def named(digits: re.Match[str]) -> str:
        name = f"{prefix}{len(longs)}_"
        longs[name] = digits[0]
        return name

    return _LONG_INTEGER.sub(named, text), longs


def _literal(node: ast.expr, longs: Mapping[str, str], *, is_argument: bool = False) -> Any:
    """Returns the value of a literal of Python or JSON, in JSON's types. Raises ValueError or TypeError for anything else.

    A key that is no text is refused in an argument, which reaches a function as JSON. A returned value is written as JSON
    as well, so that an expected one may have such keys.
    """
    match node:
        case ast.Constant(value=str(text)):
            for name, digits in longs.items():
                text = text.replace(name, digits)  # the digits stood in a text
            return text
        case ast.Constant(value=bool() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.Name(id=name) if name in longs:
            return Decimal(longs[name])
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _literal(operand, longs)
            if isinstance(number, bool) or not isinstance(number, (int, float, Decimal)):
                raise ValueError(f"a sign before {number!r}, which is no number")
            if isinstance(sign, ast.UAdd):
                return number
            return number.copy_negate() if isinstance(number, Decimal) else -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, longs, is_argument=is_argument) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_object_key(key, longs, is_argument) for key in keys]
            return {k: _literal(v, longs, is_argument=is_argument) for k, v in zip(names, values, strict=True)}
    raise ValueError(f"{type(node).__name__} is no literal")


def _object_key(node: ast.expr | None, longs: Mapping[str, str], is_argument: bool) -> str:
    if node is None:
        raise ValueError("** is no key")
    key = _literal(node, longs)
    if is_argument and not isinstance(key, str):
        raise ValueError(f"the key {key!r} is no text")
    (name,) = json.loads(json.dumps({key: None}))
    return str(name)


def _key(case: Case) -> str:
    """Returns a key that is equal for inputs that differ only in space around lines, which programs do not tell apart."""
    if isinstance(case.given, str):
        return "\n".join(line.rstrip() for line in case.given.strip().splitlines())
    return json.dumps(case.given, sort_keys=True, default=str)


def _once(cases: Sequence[Case]) -> list[Case]:
    first: dict[str, Case] = {}
    for case in cases:
        first.setdefault(_key(case), case)
    return list(first.values())


def _contradiction(cases: Sequence[Case], checker: str, *, is_call: bool) -> tuple[Any, Any, Any] | None:
    """Returns an input and two expected outputs of it of which the checker accepts neither for the other.

    Returns None where there is none.
    """
    if checker == "custom":
        return None
    agree = is_right_value if is_call else OUTPUT_CHECKERS[checker]
    expected: dict[str, Any] = {}
    for case in cases:
        other = expected.setdefault(_key(case), case.expected)
        if not agree(other, case.expected) and not agree(case.expected, other):
            return case.given, other, case.expected
    return None
