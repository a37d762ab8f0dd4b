"""expressions: conditions on the edges of a declared graph -> true or false. They are parsed into a small tree and are never
run as code.

    answer.text != "" and not (verify.status in ["correct", "uncertain"]) and step < 4

The language has names, their fields (a.b) and items of lists (a.b[0]), text, numbers, true, false, null, lists of these,
== != < <= > >= in, not in, and, or, not.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class Expression:
    """Holds a condition that has been parsed."""

    text: str
    _tree: ast.expr
    names: frozenset[str]
    """The dotted names that it reads."""

    def __call__(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the condition holds. Missing names are null.

        A comparison of values that cannot be compared is false.
        """
        return bool(_value(self._tree, values))


def parse_expression(text: str) -> Expression:
    """Parses a condition; ValueError names the part that is not in the language."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"condition of {len(text)} characters, at most {MAX_CHARS}: split the node")
    try:
        tree = parse_python(text.strip(), "eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"condition {text[:80]!r} cannot be read: {error}") from None
    names: set[str] = set()
    _check(tree, text, names)
    return Expression(text, tree, frozenset(names))


def _check(node: ast.expr, text: str, names: set[str], depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"condition {text[:80]!r} is nested more than {MAX_DEPTH} deep: split the node")
    match node:
        case ast.BoolOp(values=values):
            parts = values
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            parts = [operand]
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            parts = [left, *comparators]
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            parts = elts
        case ast.Constant(value=str() | int() | float() | bool() | None):
            return
        case ast.Name(id=name) if name in _CONSTANTS:
            return
        case ast.Name() | ast.Attribute() | ast.Subscript() if _dotted(node):
            names.add(_dotted(node))
            return
        case _:
            source = ast.get_source_segment(text.strip(), node) or text
            what = "calls a function" if isinstance(node, ast.Call) else "is not of the language of conditions"
            raise ValueError(
                f"condition {text[:80]!r}: {source[:40]!r} {what}: names, text, numbers, lists, comparisons, and, or, not "
                "are all there is"
            )
    for part in parts:
        _check(part, text, names, depth + 1)


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


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return look_up(_dotted(node), values)
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            return [_value(part, values) for part in elts]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, values)
        case ast.UnaryOp(operand=operand):
            number = _value(operand, values)
            return -number if isinstance(number, (int, float)) else None
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, values) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            return _compare(_value(left, values), ops, [_value(part, values) for part in comparators])
    raise AssertionError(f"{ast.dump(node)} passed the check")


def _compare(left: Any, ops: list[ast.cmpop], others: list[Any]) -> bool:
    for op, other in zip(ops, others, strict=True):
        try:
            holds = _COMPARE[type(op)](left, other)
        except TypeError:  # 3 < "a", or a look into what holds nothing
            return False
        if not holds:
            return False
        left = other
    return True
