"""A repository as a world: what agents see, what is graded, and changes that cheat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiers import each_push

from serve_apps.extensions.repository.grading import outcome_of
from serve_apps.extensions.repository.repository import Repository
from serve_apps.extensions.repository.snapshot import read_snapshot
from serve_apps.extensions.repository.suite import suite
from serve_apps.extensions.repository.wrong_tests import with_wrong_expectations
from tests.serve_apps.extensions.repository.hostile_changes import (
    CHANGES,
    EACH_PUSH,
    FAIL_TO_PASS,
    FILES,
    FOOL_A_PLAIN_RUN,
    HIDDEN,
    PASS_TO_PASS,
    REPAIR,
)

pytestmark = [pytest.mark.test, pytest.mark.needs_program("bwrap")]


def repository(**settings: Any) -> Repository:
    given = {"files": FILES, "tests": HIDDEN, "FAIL_TO_PASS": FAIL_TO_PASS, "PASS_TO_PASS": PASS_TO_PASS, "time_s": 10}
    return Repository(**{**given, **settings})


def played(*actions: str, **settings: Any) -> dict[str, Any]:
    """What the last action shows."""
    world = repository(**settings)
    seen = world.reset()
    for action in actions:
        seen = world.step(action)
    return seen


def test_a_repair_is_found_by_reading_changing_and_testing() -> None:
    assert played()["text"] == "Files: calc.py, text.py"
    assert played("read calc.py")["text"].splitlines()[:2] == ["1 def add(a, b):", "2     return a - b"]
    assert played("test")["text"] == "test_calc.py::test_add: assert 1 == 3"
    assert played(REPAIR, "test")["text"] == "1 passed"
    seen = played(REPAIR, "submit")
    assert seen["reward"] == 1.0 and seen["is_done"] and seen["info"]["is_resolved"]
    assert "-    return a - b\n+    return a + b\n" in seen["info"]["diff"]


SHAPES = {
    "two words.py": "import functools\n\n@functools.cache\ndef area(a):\n    return a * a\n\nclass Box:\n    def side(self):\n        return 2\n",
    "broken.py": "def add(a, b:\n    return a\n",
    "deep.py": "x = " + "(" * 5000 + ")" * 5000 + "\n",
}


@pytest.mark.parametrize(
    ("action", "shown"),
    [
        ("read two words.py area", ["3 @functools.cache", "4 def area(a):", "5     return a * a"]),
        ("read two words.py side", ["8     def side(self):", "9         return 2"]),
        ("read two words.py Box", ["7 class Box:", "8     def side(self):", "9         return 2"]),
        ("read broken.py add", ["1 def add(a, b:", "2     return a"]),
    ],
)
def test_a_function_of_a_file_is_shown_with_the_numbers_of_its_lines(action: str, shown: list[str]) -> None:
    assert played(action, files={**FILES, **SHAPES})["text"].splitlines() == shown


def test_a_name_that_a_file_has_not_shows_all_of_it() -> None:
    files = {**FILES, **SHAPES}
    whole = played("read two words.py", files=files)["text"]
    assert whole == played("read two words.py gap", files=files)["text"] and len(whole.splitlines()) == 9
    assert played("read deep.py add", files=files)["text"].startswith("1 x = (((")
    assert played("read none.py add", files=files)["text"].startswith("There is no none.py add.")


def test_a_state_is_the_change_so_far() -> None:
    untouched, read = played(), played("read calc.py")
    changed, back = played(REPAIR), played("edit calc.py 2\nreturn a", REPAIR)
    assert untouched["anchor"] == read["anchor"] != changed["anchor"] == back["anchor"]


def test_each_push_names_changes_that_exist() -> None:
    assert {*CHANGES} >= {*EACH_PUSH, *FOOL_A_PLAIN_RUN}


@pytest.mark.parametrize("name", each_push(CHANGES, EACH_PUSH))
def test_a_change_that_cheats_resolves_nothing(name: str) -> None:
    seen = played(*CHANGES[name], "submit")
    assert seen["reward"] == 0.0 and not seen["info"]["is_resolved"], seen
    assert played(REPAIR, "submit")["reward"] == 1.0, "the next change is judged as ever"


@pytest.mark.parametrize("name", each_push(FOOL_A_PLAIN_RUN, EACH_PUSH))
def test_some_of_them_fool_a_plain_run_of_the_tests(name: str) -> None:
    """So the second run, with wrong expectations, is what finds them."""
    changed = {"calc.py": CHANGES[name][0].partition("\n")[2]}
    with suite() as tests:
        files = {path: text.encode() for path, text in {**FILES, **HIDDEN, **changed}.items()}
        ran = tests.run(files, ["test_hidden.py"])
    assert {ran.outcomes[test] for test in (*FAIL_TO_PASS, *PASS_TO_PASS)} == {"passed"}


def test_a_name_that_is_cut_within_its_parameters_stands_for_those_that_begin_so() -> None:
    outcomes = {"t.py::a[x 1]": "passed", "t.py::a[x 2]": "passed", "t.py::b[y 1]": "passed", "t.py::b[y 2]": "failed"}
    names = ["t.py::a[x", "t.py::b[y", "t.py::b[y 2]", "t.py::c"]
    assert [outcome_of(name, outcomes) for name in names] == ["passed", "", "failed", ""]


def test_a_repair_counts_where_the_failing_test_is_one_of_the_repository() -> None:
    own = {"tests": None, "FAIL_TO_PASS": ["test_calc.py::test_add"], "PASS_TO_PASS": []}
    assert played(REPAIR, "submit", **own)["reward"] == 1.0
    seen = played(*CHANGES[FOOL_A_PLAIN_RUN[0]], "submit", **own)
    assert seen["reward"] == 0.0 and not seen["info"]["is_resolved"], seen


def test_a_file_that_judges_may_not_be_changed_whatever_its_name() -> None:
    named = {
        "tests": None,
        "files": {**FILES, "checks.py": FILES["test_calc.py"]},
        "FAIL_TO_PASS": ["checks.py::test_add"],
    }
    assert "may not be changed" in played("write checks.py\ndef test_add(): pass", **named, PASS_TO_PASS=[])["text"]


def test_what_breaks_another_test_is_no_repair() -> None:
    seen = played(REPAIR, "edit text.py 2\nreturn word", "submit")
    assert (seen["reward"], seen["info"]["fail_to_pass"], seen["info"]["pass_to_pass"]) == (0.0, 1.0, 0.5)


def test_an_action_that_means_nothing_is_data() -> None:
    for action in ("", "rm -rf /", "read", "read nothing.py", "edit calc.py two\nx"):
        seen = played(action)
        assert not seen.get("is_done") and seen["text"], action


def test_a_repository_that_is_not_broken_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FAIL_TO_PASS: test_hidden\.py::test_double passes before the repair"):
        played(FAIL_TO_PASS=["test_hidden.py::test_double"])
    with pytest.raises(ValueError, match="FAIL_TO_PASS is empty"):
        repository(FAIL_TO_PASS="[]")
    with pytest.raises(ValueError, match="no list of tests as pytest names them"):
        repository(FAIL_TO_PASS='["test_add"]')


@pytest.mark.needs_program("git")
def test_a_row_of_swe_bench_with_a_snapshot_is_read_as_it_is(tmp_path: Path) -> None:
    for path, text in FILES.items():
        (tmp_path / path).write_text(text)
    lines = HIDDEN["test_hidden.py"].splitlines()
    patch = "diff --git a/test_hidden.py b/test_hidden.py\nnew file mode 100644\n--- /dev/null\n+++ b/test_hidden.py\n"
    patch += f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
    row = {
        "repo": "me/calc", "instance_id": "me__calc-1", "base_commit": "0" * 40, "patch": "", "problem_statement": "add",
        "hints_text": "", "version": "1", "test_patch": patch, "snapshot": str(tmp_path), "files": None, "tests": None,
        "FAIL_TO_PASS": '["test_hidden.py::test_add"]', "PASS_TO_PASS": '["test_hidden.py::test_double"]',
    }  # fmt: skip
    assert played(REPAIR, "submit", **row)["reward"] == 1.0
    assert played("submit", **row)["reward"] == 0.0
    with pytest.raises(ValueError, match="the patch does not apply: error: patch failed"):
        repository(**{**row, "test_patch": "--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-no such line\n+x\n"})


def test_a_snapshot_with_a_link_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.py").write_text("x = 1\n")
    (tmp_path / "same.py").symlink_to("in.py")
    assert read_snapshot(tmp_path) == {"in.py": b"x = 1\n", "same.py": b"x = 1\n"}
    (tmp_path / "out").symlink_to("/etc")
    with pytest.raises(ValueError, match=r"out is a link to /etc, out of it"):
        read_snapshot(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        read_snapshot(tmp_path / "nothing")
    (tmp_path / "out").unlink()
    with (tmp_path / "large").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(ValueError, match="its files have more than 16 MiB"):
        read_snapshot(tmp_path)


def test_a_test_with_wrong_expectations_fails_whatever_it_compares(tmp_path: Path) -> None:
    source = (
        '"""Doc."""\nfrom __future__ import annotations\nimport unittest\n'
        "def test_number(): assert 1 + 1 == 2\ndef test_text(): assert 'a' == 'a'\ndef test_flag(): assert (1 < 2) == True\n"
        "def test_list(): assert [1] == [1]\ndef test_dict(): assert {'a': 1} == {'a': 1}\ndef test_none(): assert None == None\n"
        "def test_infinite(): assert float('inf') == float('inf')\ndef test_large(): assert 1e30 == 1e30\n"
        "def test_tuple(): assert (1,) == (1,)\ndef test_object(): x = object(); assert x == x\ndef test_nothing(): assert 1 < 2\n"
        "def test_never():\n    if False:\n        assert 1 == 1\n"
        "class TestIt(unittest.TestCase):\n    def test_method(self):\n        self.assertEqual(2, 1 + 1)\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(with_wrong_expectations(source), "wrong.py", "exec"), scope)
    tests = [scope[name] for name in scope if name.startswith("test_")] + [scope["TestIt"]("test_method").debug]
    assert len(tests) == 13
    for test in tests:
        with pytest.raises(AssertionError):
            test()
