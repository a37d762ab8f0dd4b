"""What the tutorials show is what `troupe new` writes, and their code runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown_pages import fences
from tests.model_folders import write_model

pytestmark = pytest.mark.nightly

BIN = Path(sys.executable).parent


def python_blocks(page: str) -> list[str]:
    return [fence.text for fence in fences(f"infra/docs/tutorials/{page}") if fence.language == "python"]


def ran(folder: Path, *command: str) -> str:
    """What a command printed that ended well."""
    done = subprocess.run([BIN / command[0], *command[1:]], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def my_team(tmp_path: Path) -> Path:
    """The folder that the first tutorial makes."""
    ran(tmp_path, "troupe", "new", "my_team")
    return tmp_path / "my_team"


def agents_of(source: str) -> list[str]:
    """The agents that the workflow of a module declares, in a form that ignores layout."""
    (workflow,) = [
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "SolveAndReview"
    ]
    return [ast.dump(node) for node in workflow.body if isinstance(node, ast.Assign)]


def test_the_first_tutorial_shows_the_workflow_that_troupe_new_writes(my_team: Path) -> None:
    (shown,) = python_blocks("own-team.md")
    assert agents_of(shown) == agents_of((my_team / "my_team.py").read_text())


def test_the_credit_rule_of_the_tutorial_validates_and_passes_its_test(my_team: Path) -> None:
    rule, test = python_blocks("credit.md")
    with (my_team / "my_team.py").open("a") as file:
        file.write(f"\n\n{rule}")
    (my_team / "test_progress.py").write_text(test)
    assert "1 passed" in ran(my_team, "pytest", "-q", "-p", "no:cacheprovider", "test_progress.py")
    changes = ("--set", "credit.path=my_team:ProgressCredit", "--set", "train.algorithm=dr_mas")
    assert "ok" in ran(my_team, "troupe", "validate", "my_team.yaml", *changes)


@pytest.mark.test
def test_the_files_of_the_page_on_an_own_model_validate(tmp_path: Path) -> None:
    make_tasks, team = python_blocks("own-model.md")
    (config,) = [fence.text for fence in fences("infra/docs/tutorials/own-model.md") if fence.language == "yaml"]
    for name, text in {"make_tasks.py": make_tasks, "team.py": team, "own.yaml": config}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "models").mkdir()
    write_model(tmp_path / "models" / "smollm2", head_dim=32)
    ran(tmp_path, "python", "make_tasks.py")
    assert ran(tmp_path, "troupe", "validate", "own.yaml") == "own.yaml: ok (1 model groups, 3 agents)\n"
