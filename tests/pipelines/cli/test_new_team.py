"""`troupe new`: the folder validates, its test passes, and it trains; a bad name ends in one message and writes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_cli import TROUPE, said, troupe

from pipelines.cli.new_team import NUM_TASKS, check_name, team_files

pytestmark = pytest.mark.test


def made(folder: Path) -> Path:
    """The folder of `troupe new my_team`, made in `folder`."""
    done = troupe(folder, "new", "my_team")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "next: cd my_team && troupe train my_team.yaml"
    return folder / "my_team"


def test_a_new_team_validates_and_its_own_test_passes(tmp_path: Path) -> None:
    team = made(tmp_path)
    checked = troupe(team, "validate", "my_team.yaml")
    assert (checked.returncode, checked.stderr) == (0, "its code, which travels with the team: my_team.py\n")
    assert "ok (1 model groups, 2 agents)" in checked.stdout
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=team, capture_output=True, text=True
    )
    assert tested.returncode == 0, tested.stdout
    assert "4 passed" in tested.stdout


def test_sentences_for_answers_which_the_new_rule_never_pays_are_counted(tmp_path: Path) -> None:
    team = made(tmp_path)
    gate = team / "tasks" / "gate.jsonl"
    first, *others = gate.read_text().splitlines()
    row = json.loads(first)
    gate.write_text("\n".join([json.dumps(row | {"answer": f"The result is {row['answer']}."}), *others]))
    checked = troupe(team, "validate", "my_team.yaml")
    assert checked.returncode == 0
    assert (
        f"1 tasks have a sentence for an answer, which only the same sentence matches, for example 'The result is {row['answer']}.'"
        in (checked.stderr)
    )


def test_the_new_files_are_lint_free_and_formatted(tmp_path: Path) -> None:
    team = made(tmp_path)
    ruff = [str(TROUPE.with_name("ruff"))]
    plain = ["--isolated", "--no-cache", "--line-length", "120", "."]
    checked = subprocess.run([*ruff, "check", "--select", "E,F,I,UP,B,SIM,RUF", *plain], cwd=team, capture_output=True)
    formatted = subprocess.run([*ruff, "format", "--check", *plain], cwd=team, capture_output=True)
    assert (checked.returncode, formatted.returncode) == (0, 0), checked.stdout + formatted.stdout


def test_the_printed_files_are_the_files_of_the_folder(tmp_path: Path) -> None:
    printed = troupe(tmp_path, "new", "my_team").stdout.splitlines()[:-1]
    written = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(printed) == sorted(written) == sorted(f"my_team/{path}" for path in team_files("my_team"))


def test_the_tasks_are_different_problems_with_right_answers() -> None:
    texts = team_files("my_team")
    rows = [json.loads(line) for section in NUM_TASKS for line in texts[f"tasks/{section}.jsonl"].splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == sum(NUM_TASKS.values())
    for row in rows:
        a, b, c = map(int, re.split(r"[+*]", row["question"]))
        assert row["answer"] == str(a + b * c)


def test_a_problem_and_the_same_with_its_factors_exchanged_are_in_one_set_of_tasks() -> None:
    texts = team_files("my_team")
    problems = {}
    for section in NUM_TASKS:
        questions = [json.loads(line)["question"] for line in texts[f"tasks/{section}.jsonl"].splitlines()]
        problems[section] = {
            (a, *sorted((b, c))) for a, b, c in (re.split(r"[+*]", question) for question in questions)
        }
    assert len(set.union(*problems.values())) == sum(map(len, problems.values())) > 300


@pytest.mark.parametrize("name", ["off", "yes", "null"])
def test_a_team_may_be_called_what_yaml_has_another_meaning_for(name: str) -> None:
    assert yaml.safe_load(team_files(name)[f"{name}.yaml"])["run"] == name


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "my_team").mkdir()
    (tmp_path / "my_team" / "notes.txt").write_text("mine")
    assert "my_team exists already: choose another name" in said(tmp_path, "new", "my_team")
    assert [path.name for path in (tmp_path / "my_team").iterdir()] == ["notes.txt"]


def test_a_bad_name_ends_in_one_message(tmp_path: Path) -> None:
    assert "'my-team' is no name of a Python module: use 'my_team'" in said(tmp_path, "new", "my-team")


@pytest.mark.parametrize(
    ("name", "fault", "suggestion"),
    [
        ("", "is no name of a Python module", "team"),
        ("teams/my team", "is no name of a Python module", "teams_my_team"),
        ("3d", "is no name of a Python module", "team_3d"),
        ("_team", "is no name of a Python module", "team"),
        ("käfer", "is no name of a Python module", "k_fer"),
        ("my-class", "is no name of a Python module", "my_class"),
        ("class", "is a keyword of Python", "class_team"),
        ("match", "is a keyword of Python", "match_team"),
        ("json", "hides the module 'json' of Python's standard library", "json_team"),
        ("stores", "hides the installed module 'stores'", "stores_team"),
        ("pydantic", "hides the installed module 'pydantic'", "pydantic_team"),
    ],
)
def test_names_that_cannot_be_modules_are_refused_with_one_that_can(name: str, fault: str, suggestion: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{fault}: use {suggestion!r}, for example")):
        check_name(name)
    check_name(suggestion)


@pytest.mark.nightly
def test_a_new_team_trains_to_its_end(tmp_path: Path) -> None:
    team = made(tmp_path)
    done = subprocess.run(
        [TROUPE, "train", "my_team.yaml"], cwd=team, env=os.environ, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-4000:]
    accuracy = re.search(r"accuracy (\d\.\d{3}) -> (\d\.\d{3})", done.stdout)
    assert accuracy is not None, done.stdout
    assert float(accuracy[2]) > float(accuracy[1])
    assert (team / "runs" / "my_team" / "report.html").is_file()
