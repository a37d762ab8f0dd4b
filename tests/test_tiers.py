"""Every case of the tests is in exactly one tier, the last tier is all of them, and `make fast` imports nothing heavy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import EVERYTHING, TIERS, is_left_out, played

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]
CASES = """
import pytest
pytestmark = pytest.mark.{of_module}

def test_of_the_module(): pass

@pytest.mark.nightly
def test_of_its_own(): pass

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.test)])
def test_by_parameter(n): pass
"""


def run(folder: Path, *options: str) -> tuple[int, list[str], str]:
    """Exit code, names of the cases collected and all output of a run in `folder` with the project's plugin."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT} {ROOT / 'tests'}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    names = [line.split("::")[1] for line in done.stdout.splitlines() if line.startswith("test_") and "::" in line]
    return done.returncode, names, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tier", "names"),
    [
        ("fast", ["test_of_the_module", "test_by_parameter[1]"]),
        ("test", ["test_of_the_module", "test_by_parameter[1]", "test_by_parameter[2]"]),
        ("nightly", ["test_of_the_module", "test_of_its_own", "test_by_parameter[1]", "test_by_parameter[2]"]),
    ],
)
def test_a_tier_plays_itself_and_those_before_it(tier: str, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES.format(of_module="fast"))
    code, collected, output = run(tmp_path, "--tier", tier, "--collect-only")
    assert (code, collected) == (0, names), output


def test_without_a_tier_every_case_is_played(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES.format(of_module="fast"))
    assert len(run(tmp_path, "--collect-only")[1]) == 4 and played(EVERYTHING) == tuple(TIERS)


@pytest.mark.parametrize(
    "marks", ["", "pytestmark = [pytest.mark.fast, pytest.mark.test]\n", "@pytest.mark.fast\n@pytest.mark.test\n"]
)
def test_a_case_without_a_tier_or_with_two_fails_and_says_so(marks: str, tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(f"import pytest\n{marks}def test_it(): pass\n")
    code, _, output = run(tmp_path, "--tier", "fast")
    assert code == 1 and re.search(r"test_cases.py\S* is (in no tier|marked fast and test): ", output), output


def test_a_file_that_names_no_tier_to_be_played_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "test_heavy.py").write_text("import pytest\npytestmark = pytest.mark.nightly\nimport no_such_module\n")
    (tmp_path / "test_light.py").write_text("import pytest\npytestmark = pytest.mark.fast\ndef test_it(): pass\n")
    assert run(tmp_path, "--tier", "fast", "--collect-only")[:2] == (0, ["test_it"])
    assert is_left_out(tmp_path / "test_heavy.py", "test") and not is_left_out(tmp_path / "test_heavy.py", "nightly")


def test_no_two_test_files_have_one_name() -> None:
    """Pytest imports them by name: of two, only one can be collected, and a tier that has both does not begin."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if not (path.parent / "__init__.py").exists():
            places.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
