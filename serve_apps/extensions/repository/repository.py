"""repository: a world of files, tests and an issue. What agents change is kept as a patch; nothing runs between two actions.

read calc.py                 its lines, with numbers
read calc.py add             those of the function or class `add` of it; all of them where it has none
edit calc.py 2               line 2 becomes the text in the lines that follow, at the same indentation
  return a + b
write calc.py                the file becomes the lines that follow
test                         what the tests that agents may see say
submit                       the hidden tests: reward 1.0 where the repository is repaired, else 0.0; the end
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import PurePosixPath
from typing import Any

from serve_apps.extensions.repository.grading import files_of, grade
from serve_apps.extensions.repository.snapshot import is_protected, is_test, read_snapshot, with_patch
from serve_apps.extensions.repository.suite import LIMITS, Files, SuiteRun, shared_suite
from stores.syntax_trees import parse_python

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
MAX_LISTED, MAX_SHOWN = 100, 20_000
"""Files of a listing, and characters of a file or of a diff that are shown."""
USAGE = "Write: read FILE, read FILE NAME, edit FILE LINE and the new text below, write FILE and the text below, test, or submit."


class Repository:
    """A repository with a fault, as a row of SWE-bench describes it.

    Its settings may be such a row; fields that say nothing to a world (`repo`, `hints_text`, ...) are ignored.
    """

    def __init__(
        self,
        *,
        files: Mapping[str, str] | None = None,
        snapshot: str = "",
        tests: Mapping[str, str] | None = None,
        test_patch: str = "",
        FAIL_TO_PASS: Sequence[str] | str = (),
        PASS_TO_PASS: Sequence[str] | str = (),
        site: str = "",
        time_s: float = 30.0,
        memory_mib: int = 512,
        **_: Any,
    ) -> None:
        """Args:
        files: the repository by paths; or:
        snapshot: its folder.
        tests: hidden test files by paths; or:
        test_patch: the patch that brings them.
        FAIL_TO_PASS, PASS_TO_PASS: hidden tests that must pass: those that fail now, and others. A list, or its JSON.
        site: a folder of packages that the tests need, pytest among them; empty: pytest alone.
        time_s, memory_mib: limits of one run of tests.

        Raises ValueError for a repository that cannot be read, or tests that cannot be.
        """
        self._files: Files = _bytes(files) if files else read_snapshot(snapshot)
        with_tests = {**self._files, **_bytes(tests)} if tests else with_patch(self._files, test_patch)
        self._tests = {path: text for path, text in with_tests.items() if self._files.get(path) != text}
        self._fail_to_pass, self._pass_to_pass = _names(FAIL_TO_PASS), _names(PASS_TO_PASS)
        if not self._fail_to_pass:
            raise ValueError("a repository to repair names the tests that must pass then: FAIL_TO_PASS is empty")
        limits = LIMITS.model_copy(update={"time_s": time_s, "max_time_s": time_s, "memory_mib": memory_mib})
        self._suite = shared_suite(limits, site)
        self._judging = {*self._tests, *files_of([*self._fail_to_pass, *self._pass_to_pass])}
        self._changes: dict[str, bytes] = {}
        self._said = ""

    def reset(self) -> dict[str, Any]:
        """Shows the files.

        Raises ValueError where a test that must fail passes already: there is nothing to repair.
        """
        before = self._ran({**self._files, **self._tests}, files_of(self._fail_to_pass))
        passing = [name for name in self._fail_to_pass if before.outcomes.get(name) == "passed"]
        if passing or before.fault:
            why = f"{', '.join(passing)} passes before the repair" if passing else f"its hidden tests: {before.fault}"
            raise ValueError(f"FAIL_TO_PASS: {why}")
        return self._shown(self._listing())

    def step(self, action: str) -> dict[str, Any]:
        """Acts. What cannot be done is said in the text."""
        head, _, body = action.strip().partition("\n")
        verb, _, rest = head.strip().partition(" ")
        actions: dict[str, Callable[[], dict[str, Any]]] = {
            "read": lambda: self._shown(self._read(*_path_and_name(rest.strip(), self._now))),
            "edit": lambda: self._shown(self._edit(rest, body)),
            "write": lambda: self._shown(self._write(rest.strip(), body + "\n")),
            "test": lambda: self._shown(self._test()),
            "submit": self._submit,
        }
        return actions.get(verb, lambda: self._shown(USAGE))()

    def _ran(self, files: Files, selected: Sequence[str]) -> SuiteRun:
        return self._suite.remembered(
            ("run", sorted(files.items()), selected), lambda: self._suite.run(files, selected)
        )

    @property
    def _now(self) -> Files:
        return {**self._files, **self._changes}

    def _read(self, path: str, name: str) -> str:
        if path not in self._now:
            return f"There is no {path}. {self._listing()}"
        try:
            text = self._now[path].decode()
        except UnicodeDecodeError:
            return f"{path} is no text."
        lines = list(enumerate(text.splitlines(), 1))
        first, last = _span_of(name, text) or (1, len(lines))
        return "\n".join(f"{number} {line}" for number, line in lines[first - 1 : last])[:MAX_SHOWN]

    def _edit(self, rest: str, body: str) -> str:
        path, _, number = rest.strip().rpartition(" ")
        lines = self._now.get(path, b"").decode(errors="replace").splitlines()
        if not number.isdecimal() or not 1 <= int(number) <= len(lines):
            return f"There is no line {number or '?'} in {path or '?'}: it has {len(lines)}."
        line = lines[int(number) - 1]
        indent = line[: len(line) - len(line.lstrip())] if body == body.lstrip() else ""
        lines[int(number) - 1 : int(number)] = [indent + text for text in body.splitlines()]
        return self._write(path, "\n".join(lines) + "\n")

    def _write(self, path: str, text: str) -> str:
        pure = PurePosixPath(path)
        if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path:
            return f"{path!r} is no path in the repository."
        if is_protected(path, self._files) or path in self._judging:
            return f"{path} may not be changed: it decides how the repository is judged."
        self._changes[path] = text.encode()
        self._said = ""
        return f"{path} is changed."

    def _test(self) -> str:
        visible = sorted(path for path in self._files if is_test(path))
        ran = self._ran(self._now, visible)
        failed = [name for name, outcome in ran.outcomes.items() if outcome in ("failed", "error")]
        messages = [f"{name.rpartition('/')[2]}: {_line(ran.messages.get(name, ''))}" for name in failed]
        self._said = f"no outcome: {ran.fault}" if ran.fault else "\n".join(messages) or f"{len(ran.outcomes)} passed"
        return self._said

    def _submit(self) -> dict[str, Any]:
        tree, now, others = {**self._now, **self._tests}, self._fail_to_pass, self._pass_to_pass
        graded = self._suite.remembered(
            ("grade", sorted(tree.items()), now, others),
            lambda: grade(self._suite, tree, fail_to_pass=now, pass_to_pass=others),
        )
        reason = graded.fault or f"fail to pass {graded.fail_to_pass:.2f}, pass to pass {graded.pass_to_pass:.2f}"
        return {
            **self._shown("Repaired." if graded.is_resolved else f"Not repaired: {reason}."),
            "reward": float(graded.is_resolved),
            "is_done": True,
            "info": {
                "is_resolved": graded.is_resolved,
                "fail_to_pass": graded.fail_to_pass,
                "pass_to_pass": graded.pass_to_pass,
                "fault": graded.fault,
                "diff": self.diff[:MAX_SHOWN],
            },
        }

    @property
    def diff(self) -> str:
        """The change so far, as a unified diff."""
        texts = []
        for path in sorted(self._changes):
            old, new = (files.get(path, b"").decode(errors="replace") for files in (self._files, self._changes))
            lines = difflib.unified_diff(
                old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{path}", f"b/{path}"
            )
            texts.append("".join(lines))
        return "".join(texts)

    def _listing(self) -> str:
        paths = sorted(path for path in self._now if not is_protected(path, {}))
        more = f" and {len(paths) - MAX_LISTED} more" * (len(paths) > MAX_LISTED)
        return f"Files: {', '.join(paths[:MAX_LISTED])}{more}"

    def _shown(self, text: str) -> dict[str, Any]:
        state = sha256(repr((sorted(self._changes.items()), self._said)).encode()).hexdigest()[:16]
        return {"text": text, "info": {"diff": self.diff[:MAX_SHOWN]}, "anchor": state}


def _path_and_name(text: str, files: Mapping[str, bytes]) -> tuple[str, str]:
    """Splits what follows `read`: a path, which may have blanks, and perhaps a name."""
    path, _, name = text.rpartition(" ")
    return (text, "") if text in files or path not in files else (path, name)


def _span_of(name: str, text: str) -> tuple[int, int] | None:
    """Returns the first and last line, from 1, of the function or class of this name; None where there is none, or the text is no Python."""
    try:
        nodes = ast.walk(parse_python(text)) if name else iter(())
        found = next((node for node in nodes if isinstance(node, DEFINITIONS) and node.name == name), None)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # an agent may have written it
        return None
    if found is None or found.end_lineno is None:
        return None
    return min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)]), found.end_lineno


def _names(value: Sequence[str] | str) -> list[str]:
    names = json.loads(value) if isinstance(value, str) else list(value)
    if not isinstance(names, list) or not all(isinstance(name, str) and "::" in name for name in names):
        raise ValueError(f"{str(value)[:80]!r} is no list of tests as pytest names them: tests/test_x.py::test_y")
    return names


def _bytes(texts: Mapping[str, str]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in texts.items()}


def _line(message: str) -> str:
    return message.partition("\n")[0]
