"""The wheel holds what git tracks of the five packages, and works with the core dependencies alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from locks import lock

pytestmark = pytest.mark.test

ROOT = Path(__file__).parents[2]
PACKAGES = ("dags", "pipelines", "serve_apps", "stores", "train_loops")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if path]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files alone: what else lies in the folders cannot get into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in (*tracked_files(), "pyproject.toml", "README.md", "LICENSE"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    built = subprocess.run([sys.executable, "-c", BUILD, out], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out / built.stdout.splitlines()[-1]


def test_the_wheel_holds_the_tracked_files_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(tracked_files())


@pytest.mark.nightly
def test_the_wheel_validates_a_code_workflow_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Needs a package index: the core dependencies are installed from it, at the versions of the lock."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    bin_folder = tmp_path / "venv" / "bin"
    versions = tmp_path / "versions.txt"  # pip takes no hashes of constraints for a wheel that has none
    versions.write_text("\n".join(lock("cpu")))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    installed = subprocess.run(
        [bin_folder / "python", "-m", "pip", "install", "--quiet", "-c", versions, wheel],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert installed.returncode == 0, installed.stderr
    for arguments in (
        ["validate", ROOT / "infra" / "workflows" / "reflective_code.yaml"],
        ["new", "my_team"],
    ):
        done = subprocess.run(
            [bin_folder / "troupe", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [bin_folder / "troupe", "validate", "my_team.yaml"],
        cwd=tmp_path / "my_team",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
