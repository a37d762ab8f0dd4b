"""Whatever reads what a model, a program or a caller wrote takes time in proportion to it, for hostile text too.

Every regular expression of the packages is found: those that a module holds by importing it, those that stand in a call by
reading its source. Each reads texts of 256 KiB (32 KiB at each push) that are made for it, from its own syntax tree.
Expressions that are put together when they are used have to be in `IN_CALLS`, with the function that is played with hostile
texts instead.
"""

from __future__ import annotations

import ast
import importlib
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import FrameType, ModuleType
from typing import Any

import pytest
from tiers import each_push

from pipelines.cluster.faults import diagnose
from pipelines.examples.calculator.program import calculate
from pipelines.extensions.code_tasks.checkers import has_same_tokens, is_right_output, is_right_value
from pipelines.extensions.code_tasks.code_tests import Case, CodeTests, expand_batched, foreign_modules, read_tests
from pipelines.extensions.code_tasks.code_verifier import extract_code, time_limit
from pipelines.figures.of_episodes import is_refusal
from pipelines.run.scoring import without_ids
from pipelines.tasks.task_fields import read_task
from serve_apps.authoring.agent import Reply, TracedText
from serve_apps.authoring.boxed import last_boxed
from serve_apps.authoring.contracts import Boxed, JsonKeys, OneOf, Raw, Tags, Thinking
from serve_apps.authoring.prompt_budget import shorten
from serve_apps.authoring.thinking import after_thinking
from serve_apps.chat import long_json
from serve_apps.extensions.graphs.templates import as_prompt, fields_of, fill, stray_brace
from serve_apps.extensions.paper_workflows.debate import without_answer
from serve_apps.extensions.paper_workflows.iterative_search import Plan, _apply
from serve_apps.gateway.traffic.redaction import Redaction
from serve_apps.openai_api.tool_calls import parse_tool_calls
from serve_apps.tools.math_answer import extract_answer, is_correct
from serve_apps.tools.math_strings import is_same_string
from serve_apps.tools.text_match import exact_match, f1, normalize
from stores.syntax_trees import parse_python

pytestmark = pytest.mark.test

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipelines", "serve_apps", "stores")
MIB = 1 << 20
SIZES = {"test": 32 << 10, "nightly": 256 << 10}
"""Bytes of a hostile text by tier: an eighth takes an eighth of the time, and quadratic time is still ten times the limit."""
CPU_S_PER_MIB = 40.0
"""Seconds of processor for one text. In linear time it takes milliseconds, in quadratic time minutes to hours."""

IN_CALLS = {
    ("pipelines/cluster/faults.py", "re.compile"): "held by the module, which is imported",
    (
        "pipelines/examples/made_up_facts/tasks.py",
        "re.search",
    ): "a name of the task, then literal words and \\w+",
    ("pipelines/run/kept_weights.py", "re.fullmatch"): "names of folders that the run itself has made",
    ("serve_apps/authoring/boxed.py", "re.compile"): "held by the module, which is imported",
    ("serve_apps/authoring/contracts.py", "re.finditer"): "Tags and OneOf",
    ("serve_apps/chat/control_tokens.py", "re.compile"): "alternatives of literal tokens, and a mask of Troupe's own",
    ("serve_apps/tools/plain_signs.py", "re.compile"): "held by the module, which is imported",
    ("pipelines/extensions/code_tasks/code_tests.py", "re.compile"): "held by the module, which is imported",
    ("serve_apps/tools/math_answer.py", "re.compile"): "held by the module, which is imported",
    ("serve_apps/tools/text_match.py", "re.compile"): "held by the module, which is imported",
    ("serve_apps/extensions/paper_workflows/debate.py", "re.sub"): "without_answer",
    ("stores/types.py", "re.fullmatch"): "four digits of an id",
}
"""Expressions that no constant holds: what plays them, or why nobody else writes what they read."""


@contextmanager
def limited(what: str, seconds: float) -> Iterator[None]:
    """Raises where the body takes more than some seconds of processor; `re` looks for signals as it runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"more than {seconds} s of processor for {what}")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@cache
def sources() -> dict[Path, ast.Module]:
    """The files that use regular expressions. Programs of frameworks, which have requirements of their own, cannot be imported here."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).glob("**/*.py"))]
    files = [file for file in files if file.name != "program.py" or not file.with_name("requirements.txt").exists()]
    trees = {file: parse_python(file.read_text()) for file in files}
    return {file: tree for file, tree in trees.items() if {"re", "regex"} & imports(tree)}


def imports(tree: ast.Module) -> set[str]:
    return {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The function of `re` and the expression of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "re" and node.func.attr not in ("escape", "error"):
                yield f"re.{node.func.attr}", node.args[0]


@cache
def patterns() -> dict[str, re.Pattern[str]]:
    """Every regular expression by where it stands."""
    found: dict[str, re.Pattern[str]] = {}
    for file, tree in sources().items():
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found |= {f"{name}: {where}": pattern for where, pattern in held(importlib.import_module(name))}
        constants = [part.value for _, part in calls(tree) if isinstance(part, ast.Constant)]
        known = {pattern.pattern for pattern in found.values()}
        found |= {
            f"{name}: {c!r}": re.compile(c, re.DOTALL) for c in constants if isinstance(c, str) and c not in known
        }
    return found


def held(module: ModuleType) -> Iterator[tuple[str, re.Pattern[str]]]:
    """The patterns in a module's variables and classes, in tuples and mappings too."""
    todo: list[tuple[str, Any, int]] = [(name, value, 0) for name, value in vars(module).items() if name[:2] != "__"]
    while todo:
        name, value, depth = todo.pop()
        if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
            yield name, value
        elif depth > 3:
            continue
        elif isinstance(value, (list, tuple)):
            todo += [(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(islice(value, 100))]
        elif isinstance(value, Mapping):
            todo += [(f"{name}[{key!r}]", item, depth + 1) for key, item in islice(value.items(), 100)]
        elif isinstance(value, type) and value.__module__ == module.__name__:
            todo += [(f"{name}.{key}", item, depth + 1) for key, item in vars(value).items()]


@cache
def uses(where: str) -> list[Callable[[re.Pattern[str], str], Any]]:
    """How a pattern is used: from the beginning of a text alone where only `match` or `fullmatch` is, else all over it."""
    module, _, name = where.partition(": ")
    tree = parse_python((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    methods = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }
    methods |= {
        function[3:] for function, part in calls(tree) if isinstance(part, ast.Constant) and repr(part.value) == name
    }
    if methods and methods <= {"match", "fullmatch"}:
        return [re.Pattern.match, re.Pattern.fullmatch]
    return [lambda pattern, text: sum(1 for _ in pattern.finditer(text))]


def sample(items: Any) -> str:
    """A text that the items of a syntax tree match, short and with each repetition once."""
    return "".join(sample_of(op, value) for op, value in items)


def sample_of(op: Any, value: Any) -> str:
    if op is codes.LITERAL:
        return chr(value)
    if op is codes.NOT_LITERAL:
        return "a" if value != ord("a") else "b"
    if op is codes.IN:
        return next(iter(members(value)), "a")
    if op is codes.BRANCH:
        return sample(value[1][0])
    if op is codes.SUBPATTERN:
        return sample(value[-1])
    if op is codes.ATOMIC_GROUP:
        return sample(value)
    if op in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        return sample(value[2]) * max(1, min(value[0], 20))
    return "a" if op is codes.ANY else ""


def members(items: Any) -> list[str]:
    """Characters of a set, one of each of its parts."""
    classes = {
        codes.CATEGORY_DIGIT: "1",
        codes.CATEGORY_SPACE: " ",
        codes.CATEGORY_WORD: "a",
        codes.CATEGORY_NOT_SPACE: "a",
        codes.CATEGORY_NOT_WORD: "-",
        codes.CATEGORY_NOT_DIGIT: "a",
    }
    if items[0][0] is codes.NEGATE:
        barred = {chr(value) for op, value in items if op is codes.LITERAL}
        return [c for c in "a1 \n(" if c not in barred]
    found = []
    for op, value in items:
        if op is codes.LITERAL:
            found.append(chr(value))
        elif op is codes.RANGE:
            found.append(chr(value[0]))
        elif op is codes.CATEGORY:
            found.append(classes[value])
    return found


def pieces(items: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """(what leads to it, what is repeated) for every repetition in a syntax tree, and the whole of each beginning."""
    for op, value in items:
        if op in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            _, high, body = value
            if high > 100:
                only = body[0] if len(body) == 1 else (None, None)
                bodies = members(only[1]) if only[0] is codes.IN else ["a", "1", " "] if only[0] is codes.ANY else []
                yield from ((before, text) for text in bodies or [sample(body)])
            yield from pieces(body, before)
        elif op is codes.BRANCH:
            for branch in value[1]:
                yield from pieces(branch, before)
                yield before, sample(branch)
        elif op is codes.SUBPATTERN:
            yield from pieces(value[-1], before)
        elif op is codes.ATOMIC_GROUP:
            yield from pieces(value, before)
        before += sample_of(op, value)
        yield "", before


def hostile(pattern: re.Pattern[str], size: int) -> list[str]:
    """Texts of `size` bytes: each repetition without an end, each beginning again and again, and a near-miss at the end."""
    parts = [
        pair for pair in dict.fromkeys(pieces(parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE))) if pair[1]
    ]
    repeated = [filled(before, body, size) for before, body in parts if before] + [
        filled("", body, size) for _, body in parts
    ]
    beginnings = [filled("", before + body, size) for before, body in parts if len(before + body) > 1]
    few = beginnings[:: max(1, len(beginnings) // 12)]
    return list(
        dict.fromkeys(f"{text}\0" for text in [*repeated[:40], *few, filled("", "a", size), filled("", " ", size)])
    )


def filled(before: str, body: str, size: int) -> str:
    return before + body * ((size - len(before)) // len(body))


@pytest.fixture(scope="module")
def size(request: pytest.FixtureRequest) -> int:
    """Bytes of a hostile text."""
    return SIZES[request.config.getoption("tier")]


@pytest.mark.parametrize("where", sorted(patterns()))
def test_a_pattern_reads_hostile_text_in_linear_time(where: str, size: int) -> None:
    pattern = patterns()[where]
    for text in hostile(pattern, size):
        with limited(f"{pattern.pattern!r} on {text[:40]!r}...{text[-10:]!r}", size / MIB * CPU_S_PER_MIB):
            for use in uses(where):
                use(pattern, text)


def test_the_patterns_are_found_and_the_hostile_texts_are_hostile(size: int) -> None:
    assert len(patterns()) > 60
    assert any(where.startswith("pipelines.extensions.code_tasks.checkers: _DECIMAL") for where in patterns())
    for slow in (r"[0-9]+\.?[0-9]*x", r"<a>(.*?)</a>", r"\^\s*\{?\s*c", r"\s*```$"):
        pattern = re.compile(slow, re.DOTALL)
        with pytest.raises(AssertionError, match="of processor for"):
            for text in hostile(pattern, size):
                with limited(slow, 0.5):
                    sum(1 for _ in pattern.finditer(text))


def test_no_expression_is_put_together_unseen() -> None:
    dynamic = {
        (str(file.relative_to(ROOT)), function)
        for file, tree in sources().items()
        for function, part in calls(tree)
        if not isinstance(part, ast.Constant)
    }
    assert dynamic == IN_CALLS.keys(), (
        "name what plays a new one with hostile texts, or why nobody else writes its text"
    )


def reply(text: str, answer: str) -> Reply:
    fields = {"solution": TracedText(text), "answer": TracedText(answer)}
    return Reply(turn_index=0, text=TracedText(text), fields=fields, is_format_ok=True, is_truncated=False)


def debated(text: str) -> Any:
    return [
        without_answer(reply(text, answer))
        for answer in (text.strip(), text[: len(text) // 2].strip() + "+", text[:150])
    ]


CALL = CodeTests(cases=(Case(given=[1], expected=1),), fn_name="f")
READERS: dict[str, Callable[[str], Any]] = {
    "extract_answer": extract_answer,
    "is_correct": lambda text: is_correct(text, ["5", r"\pi", r"\begin{pmatrix}1\\2\end{pmatrix}"]),
    "is_correct, cut": lambda text: is_correct(text[-1000:], ["5"]) or is_correct(text[:1000], ["5"]),
    "is_correct, by strings": lambda text: is_same_string(text[:1000], ["5"]),
    "normalize": normalize,
    "exact_match": lambda text: exact_match(text, ["A"]),
    "f1": lambda text: f1(text, ["A"]),
    "last_boxed": last_boxed,
    "last_boxed, many": lambda text: last_boxed(r"\boxed{1}, " + text + r", \boxed{2}, \boxed{3}" * 2000),
    "after_thinking": after_thinking,
    "Tags": Tags("a", "b", max_words={"a": 3}).parse,
    "OneOf": OneOf("a", "b").parse,
    "Thinking": Thinking(Tags("a")).parse,
    "Boxed": Boxed().parse,
    "JsonKeys": JsonKeys("a", max_items=3).parse,
    "Raw": Raw().parse,
    "Plan": lambda text: Plan().parse(f"<plan>{text}</plan><final_answer>1</final_answer>"),
    "edit of a thought": lambda text: _apply(text, {}, 0),
    "parse_tool_calls": lambda text: parse_tool_calls(text, ("a",)),
    "without_answer": debated,
    "extract_code": extract_code,
    "time_limit": time_limit,
    "is_right_output": lambda text: is_right_output("1.5 2 yes", text) or is_right_output(text, text + "1"),
    "has_same_tokens": lambda text: has_same_tokens("1", text),
    "is_right_value": lambda text: is_right_value(["1"], [text]),
    "read_tests": lambda text: refused(lambda: read_tests(text, place="t")),
    "read_tests, input": lambda text: read_tests([{"input": text, "output": "1"}], place="t"),
    "read_tests, arguments": lambda text: refused(
        lambda: read_tests({"inputs": [text], "outputs": [text], "fn_name": "f"}, place="t")
    ),
    "expand_batched": lambda text: expand_batched(CodeTests(cases=(Case(given="9 9 7", expected="8"),)), text),
    "foreign_modules": foreign_modules,
    "long_json": lambda text: refused(lambda: long_json.dumps(long_json.loads(text))),
    "fill": lambda text: fill("{a}", {"a": text}),
    "fields_of": fields_of,
    "as_prompt": as_prompt,
    "stray_brace": stray_brace,
    "shorten": lambda text: shorten(text, 1000),
    "is_refusal": is_refusal,
    "diagnose": lambda text: diagnose(RuntimeError(text)),
    "an error without ids": without_ids,
    "calculate": lambda text: refused(lambda: calculate(long_json.dumps({"expression": text}))),
    "read_task": lambda text: refused(
        lambda: [
            read_task({"prompt": p, "answer": text}, "t", "s") for p in (text, [{"role": "user", "content": text}])
        ]
    ),
    "Redaction": Redaction({r"[\w.]+@[\w.]+": "<email>", r"(a+)+$": "", r"\s*x$": ""}).clean,
}
PIECES = (
    *" a1.,-+=*_`$^!#@\\\n\t{}[]()<>|&/?\"'",
    *("<a>", "</a>", "<a></a>", "<b>", "<a/>", "<q1>", "<q1></q1>", "<q1></q1><a1>", "t1", "<think>", "</think>"),
    *("<ANSWER>", "\\boxed{", "\\boxed{}", "\\begin{pmatrix}", "\\frac", "\\frac{1}", "\\sqrt{", "\\text{", "\\\\"),
    *("1 & ", "$1$", "answer ", "answer is ", "answer: ", "I hope ", "**a", "*a*", "i ", "as an ", "```\n"),
    *("```python\n", "```json", "<code>", "<code>a</code>", "<tool_call>", "<tool_call>{}</tool_call>", '{"a":'),
    *('{"a": 1}', '["a",', "[[", "a@", "a b ", "1e", "1.5 ", "time limit ", "time limit 1", "tests ", "test "),
    *("import ", "import a\n", "from a", "a = 1, ", "a = [", "### Question:", "connection to server ", "role "),
    *("Selected to kill: (", "task name=a,", "Memory on the node (IP: ", "AWS Error ", "0.1x"),
)


def refused(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (ValueError, RecursionError) as error:
        return error


NESTED = (
    ("<a>", "</a>"),
    ("\\boxed{", "}"),
    ("[", "]"),
    ("(", ")"),
    ("<think>", "</think>"),
    ("\\begin{pmatrix}", "\\\\"),
    ("**", "**a"),
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", each_push(READERS, READERS.keys() - {"exact_match", "f1", "is_correct"}))
def test_a_reader_takes_linear_time_for_hostile_text(name: str, size: int) -> None:
    texts = [f"{filled('', piece, size)}\0" for piece in PIECES]
    texts += [
        opening * (size // 2 // len(opening)) + closing * (size // 2 // len(closing)) for opening, closing in NESTED
    ]
    for text in texts:
        with limited(f"{name} of {text[:20]!r}...{text[-10:]!r}", size / MIB * CPU_S_PER_MIB):
            READERS[name](text)
