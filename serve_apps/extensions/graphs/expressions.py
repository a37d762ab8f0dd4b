"""expressions: conditions on the edges of a declared graph -> true or false. They are parsed into a small tree and are never
run as code.

    answer.text != "" and not (verify.status in ["correct", "uncertain"]) and step < 4

The language has names, their fields (a.b) and items of lists (a.b[0]), text, numbers, true, false, null, lists of these,
== != < <= > >= in, not in, and, or, not.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stores.syntax_trees import parse_python

MAX_CHARS = 1000
MAX_DEPTH = 50
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
_CONSTANTS = {"true": True, "false": False, "null": None}


Values = Mapping[str, Any]


@dataclass(frozen=True)
class Expression:
    """Holds a condition that has been parsed."""

    text: str
    _value: Callable[[Values], Any]
    names: frozenset[str]
    """The dotted names that it reads."""

    def __call__(self, values: Values) -> bool:
        """Returns whether the condition holds. Missing names are null.

        A comparison of values that cannot be compared is false.
        """
        return bool(self._value(values))


def parse_expression(text: str) -> Expression:
    """Parses a condition; ValueError names the part that is not in the language."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"condition of {len(text)} characters, at most {MAX_CHARS}: split the node")
    try:
        tree = parse_python(text.strip(), "eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"condition {text[:80]!r} cannot be read: {error}") from None
    names: set[str] = set()
    return Expression(text, _read(tree, text, names), frozenset(names))


def _read(node: ast.expr, text: str, names: set[str], depth: int = 0) -> Callable[[Values], Any]:
    """Returns what gives the value of a part of a condition; adds the names that it reads."""
    if depth > MAX_DEPTH:
        raise ValueError(f"condition {text[:80]!r} is nested more than {MAX_DEPTH} deep: split the node")

    def parts_of(*inner: ast.expr) -> list[Callable[[Values], Any]]:
        return [_read(part, text, names, depth + 1) for part in inner]

    match node:
        case ast.BoolOp(op=op, values=inner):
            parts, decide = parts_of(*inner), all if isinstance(op, ast.And) else any
            return lambda values: decide(part(values) for part in parts)
        case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
            (part,) = parts_of(operand)
            change = operator.not_ if isinstance(op, ast.Not) else _negative
            return lambda values: change(part(values))
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARE for op in ops):
            parts = parts_of(left, *others)
            return lambda values: _compare([part(values) for part in parts], ops)
        case ast.List(elts=inner) | ast.Tuple(elts=inner):
            parts = parts_of(*inner)
            return lambda values: [part(values) for part in parts]
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return lambda values: value
        case ast.Name(id=name) if name in _CONSTANTS:
            return lambda values: _CONSTANTS[name]
        case ast.Name() | ast.Attribute() | ast.Subscript() if dotted := _dotted(node):
            names.add(dotted)
            return lambda values: look_up(dotted, values)
    source = ast.get_source_segment(text.strip(), node) or text
    what = "calls a function" if isinstance(node, ast.Call) else "is not of the language of conditions"
    raise ValueError(
        f"condition {text[:80]!r}: {source[:40]!r} {what}: names, text, numbers, lists, comparisons, and, or, not are all there is"
    )


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return "" if node.id.startswith("_") else node.id
    if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and type(node.slice.value) is int:
        base = _dotted(node.value)
        return f"{base}.{node.slice.value}" if base else ""
    return ""


def look_up(name: str, values: Mapping[str, Any]) -> Any:
    """Returns the value at a name like `a.b.0`, through fields of mappings and items of lists; None where there is none."""
    value: Any = values
    for part in name.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, (list, tuple)) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _negative(number: Any) -> Any:
    return -number if isinstance(number, (int, float)) else None


def _compare(values: Sequence[Any], ops: Sequence[ast.cmpop]) -> bool:
    for left, op, right in zip(values, ops, values[1:], strict=False):
        try:
            holds = _COMPARE[type(op)](left, right)
        except TypeError:  # 3 < "a", or a look into what holds nothing
            return False
        if not holds:
            return False
    return True
