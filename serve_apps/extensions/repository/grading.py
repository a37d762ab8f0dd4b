"""grading: a changed repository and its hidden tests -> whether it is repaired, as SWE-bench asks: all that failed pass, all that passed still do.

Tests and the code that they judge run in one process, so a program could say that they passed. Four measures:

    files       of tests, of pytest's and Python's configuration are those of the task, whatever was changed
    report      outcomes come from a plugin, with a nonce, and count by the names of the task's tests only
    a failure   a test with a random name, which is made to fail, must fail
    again       the same tests with wrong expectations must all fail, see `wrong_tests`

`swebench` counts a test that is skipped or expected to fail as good in places; here only what passed did.

A program that reads the tests and finds out which expectation is the right one can still lie. Where only functions are judged,
`CodeVerifier` is the stronger wall: it keeps what is expected outside of the sandbox.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_apps.extensions.repository.suite import Files, Suite
from serve_apps.extensions.repository.wrong_tests import with_wrong_expectations

CHEATED = "the tests pass although they must not: the change cheats"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What hidden tests say of a repository."""

    is_resolved: bool
    fail_to_pass: float
    """Share of the tests that failed before and pass now, 0 to 1."""
    pass_to_pass: float
    """Share of the tests that passed before and still do, 0 to 1."""
    fault: str = ""
    """Why nothing counts."""


def grade(suite: Suite, files: Files, *, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]) -> Grade:
    """Returns the grade of a repository.

    Args:
        files: those of the change, with the tests in place.
        fail_to_pass, pass_to_pass: tests as pytest names them: `tests/test_x.py::test_y`.
    """
    name = secrets.token_hex(8)
    failing = f"test_{name}.py"
    text = f"def test_{name}():\n    assert {name!r} == {secrets.token_hex(8)!r}\n"
    selected = [*files_of([*fail_to_pass, *pass_to_pass]), failing]
    ran = suite.run({**files, failing: text.encode()}, selected)
    if ran.fault:
        return Grade(is_resolved=False, fail_to_pass=0.0, pass_to_pass=0.0, fault=ran.fault)
    if ran.outcomes.get(f"{failing}::test_{name}") != "failed":
        return Grade(is_resolved=False, fail_to_pass=0.0, pass_to_pass=0.0, fault=CHEATED)
    now, still = (_share_passed(ran.outcomes, some) for some in (fail_to_pass, pass_to_pass))
    if now == still == 1.0 and not _fail_where_they_must(suite, files, fail_to_pass):
        return Grade(is_resolved=False, fail_to_pass=0.0, pass_to_pass=0.0, fault=CHEATED)
    return Grade(is_resolved=now == still == 1.0, fail_to_pass=now, pass_to_pass=still)


def _fail_where_they_must(suite: Suite, files: Files, names: Sequence[str]) -> bool:
    selected = files_of(names)
    wrong = {path: with_wrong_expectations(files[path].decode()).encode() for path in selected}
    ran = suite.run({**files, **wrong}, selected)
    return all(outcome_of(name, ran.outcomes) == "failed" for name in names)


def files_of(names: Sequence[str]) -> list[str]:
    """Returns the paths of the files that hold these tests."""
    return sorted({name.partition("::")[0] for name in names})


def _share_passed(outcomes: Mapping[str, str], names: Sequence[str]) -> float:
    return sum(outcome_of(name, outcomes) == "passed" for name in names) / len(names) if names else 1.0


def outcome_of(name: str, outcomes: Mapping[str, str]) -> str:
    """Returns the outcome of a test; empty where there is none.

    Names of SWE-bench are often cut within their parameters (`test_x[a`): those stand for all that begin so, if they agree.
    """
    if name not in outcomes and name.count("[") > name.count("]"):
        distinct = {outcome for other, outcome in outcomes.items() if other.startswith(name)}
        return distinct.pop() if len(distinct) == 1 else ""
    return outcomes.get(name, "")
