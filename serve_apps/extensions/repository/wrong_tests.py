"""wrong_tests: a test file -> the same file with wrong expectations, under which an honest program fails in every test.

    assert add(1, 2) == 3      ->      assert add(1, 2) == _other_1f(3)

A program that makes tests pass by other means than being right (objects that equal everything, a patched pytest, an end of the process
with success) makes these pass, too.
"""

from __future__ import annotations

import ast
import secrets

EQUALITIES = ("assertEqual", "assertEquals", "assert_equal", "assertListEqual", "assertDictEqual")
"""Methods whose first two arguments must be equal."""
OTHER = """
{name}_calls = []
def {name}(value):
    {name}_calls.append(value)
    if type(value) is bool or value is None:
        return {number}
    if type(value) in (int, float):
        return value + {number} if value + {number} != value else {number}
    if type(value) is str:
        return value + {text!r}
    if type(value) is list:
        return [*value, {number}]
    if type(value) is tuple:
        return (*value, {number})
    if type(value) is dict:
        return {{**value, {text!r}: {number}}}
    return {number}
"""


def with_wrong_expectations(source: str) -> str:
    """Returns a test file in which each test must fail. Raises SyntaxError for what is no Python."""
    tree = ast.parse(source)
    name = f"_other_{secrets.token_hex(8)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            first, last = ast.parse(f"{name}_calls.clear()\nif not {name}_calls: raise AssertionError").body
            node.body = [first, *(_Wrong(name).visit(statement) for statement in node.body), last]
    helper = OTHER.format(name=name, number=secrets.randbelow(10**6) + 10**6, text=secrets.token_hex(8))
    body = tree.body
    start = next((i for i, node in enumerate(body) if not _is_head(node)), len(body))
    tree.body = [*body[:start], *ast.parse(helper).body, *body[start:]]
    return ast.unparse(ast.fix_missing_locations(tree))


class _Wrong(ast.NodeTransformer):
    """Changes what a test expects, where it says that two values are equal; a test that never says so fails at its end."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            test.left, test.comparators[0] = self._changed(test.left, test.comparators[0])
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in EQUALITIES and len(node.args) >= 2:
            node.args[:2] = self._changed(*node.args[:2])
        return node

    def _changed(self, left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
        if _is_literal(left):  # else the value of the program: an object of its own may stand there
            return self._other(left), right
        return left, self._other(right)

    def _other(self, value: ast.expr) -> ast.expr:
        return ast.Call(func=ast.Name(id=self._name, ctx=ast.Load()), args=[value], keywords=[])


def _is_head(node: ast.stmt) -> bool:
    """Whether a statement must stay at the beginning of its file."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True
