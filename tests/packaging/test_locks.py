"""One lock serves Python 3.11, 3.12 and 3.13: what only newer Pythons need has a marker, and all of it can be had."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "infra" / "locks"
LOCAL_UV = ROOT / ".tools" / "bin" / "uv"
UV = str(LOCAL_UV) if LOCAL_UV.is_file() else "uv"


def script(name: str) -> ModuleType:
    """A script of infra/, which is no package's module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "infra" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_only_newer_pythons_need_gets_a_marker() -> None:
    lock = ["a==1", "c==3"]
    newer = {"3.12": ["a==1", "b==2"], "3.13": ["a-b==4", "b==2", "c==3"]}
    assert script("merge_locks").merge(lock, newer) == [
        "a==1",
        "a-b==4 ; python_version == '3.13'",
        "b==2 ; python_version == '3.12' or python_version == '3.13'",
        "c==3",
    ]


def test_no_package_has_two_versions_in_a_lock() -> None:
    for name in ("cpu", "cluster", "dev", "gpu", "airflow"):
        packages = [line.partition("==")[0] for line in (LOCKS / f"{name}.txt").read_text().splitlines()]
        assert len(packages) == len(set(packages)), name


@pytest.mark.parametrize(
    ("name", "python"), [("dev", "3.12"), ("dev", "3.13"), ("airflow", "3.12"), ("airflow", "3.13"), ("gpu", "3.12")]
)
def test_the_lock_resolves_for_newer_pythons(name: str, python: str, tmp_path: Path) -> None:
    """Needs a package index. torch is left out: its CPU build is on PyTorch's own index."""
    assert shutil.which(UV), "uv is installed by `make check` into .tools"
    lock = [line for line in (LOCKS / f"{name}.txt").read_text().splitlines() if not line.startswith("torch==")]
    (tmp_path / "lock.txt").write_text("\n".join(lock))
    (tmp_path / "overrides.txt").write_text((LOCKS / "overrides.txt").read_text() + "torch ; sys_platform == 'never'\n")
    settings = subprocess.run(
        [sys.executable, ROOT / "infra" / "pip_settings.py"], capture_output=True, text=True, check=True
    ).stdout
    command = f'flags=()\n{settings}\nexec "$@" "${{flags[@]}}"'
    options = ["--override", "overrides.txt", "--python-version", python, "--no-header", "--no-annotate", "--quiet"]
    resolved = subprocess.run(
        ["bash", "-c", command, "bash", UV, "pip", "compile", "lock.txt", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert resolved.returncode == 0, resolved.stderr
    missing = set(resolved.stdout.splitlines()) - {line.partition(" ;")[0] for line in lock}
    assert missing == set()
