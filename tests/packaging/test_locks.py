"""Locks: one serves Python 3.11, 3.12 and 3.13, and the set-up installs the files that it names, by their hashes, and no others."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from locks import LOCKS, ROOT, lock, script

LOCAL_UV = ROOT / ".tools" / "bin" / "uv"
UV = str(LOCAL_UV) if LOCAL_UV.is_file() else "uv"
NAMES = sorted(path.stem for path in LOCKS.glob("*.txt") if path.stem != "overrides")
SHA256 = "sha256:" + "0" * 64


@pytest.mark.fast
def test_what_only_newer_pythons_need_gets_a_marker() -> None:
    resolved = {"a==1": [SHA256], "c==3": []}
    newer = {"3.12": {"a==1": [], "b==2": []}, "3.13": {"a-b==4": [], "b==2": [SHA256], "c==3": [SHA256]}}
    assert script("merge_locks").merge(resolved, newer, {"c==2": ["sha256:old"]}) == {
        "a==1": [SHA256],
        "c==3": [SHA256],
        "b==2 ; python_version == '3.12' or python_version == '3.13'": [SHA256],
        "a-b==4 ; python_version == '3.13'": [],
    }


@pytest.mark.fast
def test_a_build_that_is_not_on_pypi_keeps_the_hashes_of_its_version() -> None:
    merge = script("merge_locks").merge
    before = {"torch==2.0+cpu": ["sha256:b", "sha256:c"], "numpy==1": ["sha256:gone"]}
    merged = merge({"torch==2.0+cpu": ["sha256:a"], "numpy==1": ["sha256:n"]}, {}, before)
    assert merged == {"torch==2.0+cpu": ["sha256:a", "sha256:b", "sha256:c"], "numpy==1": ["sha256:n"]}
    assert merge({"torch==2.1+cpu": ["sha256:a"]}, {}, before) == {"torch==2.1+cpu": ["sha256:a"]}


@pytest.mark.fast
def test_a_lock_is_read_as_it_is_written() -> None:
    text = f"a==1 \\\n    --hash={SHA256}\nb==2 ; python_version == '3.13' \\\n    --hash={SHA256}\n"
    read = {"a==1": [SHA256], "b==2 ; python_version == '3.13'": [SHA256]}
    assert script("merge_locks").read(text) == script("merge_locks").read("# by hand\n" + text) == read
    assert script("merge_locks").write(read) == text


@pytest.mark.fast
@pytest.mark.parametrize("name", NAMES)
def test_every_line_of_a_lock_has_a_hash(name: str) -> None:
    requirements = lock(name)
    assert requirements
    for requirement, hashes in requirements.items():
        assert re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.+]+( ; .+)?", requirement), requirement
        assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in hashes), requirement


@pytest.mark.fast
@pytest.mark.parametrize("name", ["cpu", "cluster", "dev"])
def test_torch_has_the_hash_of_its_wheel_for_each_python(name: str) -> None:
    """PyTorch's own, for Linux x86-64: `make lock` may see a folder that holds one of them."""
    (hashes,) = (hashes for requirement, hashes in lock(name).items() if requirement.startswith("torch=="))
    assert len(hashes) == 3, "run `make lock` where PyTorch's page of torch can be read"


def wheel(folder: Path) -> str:
    """Makes a package of one module, which nobody else has; returns its hash."""
    path = folder / "tiny_for_tests-1.0-py3-none-any.whl"
    info = "tiny_for_tests-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_for_tests.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-for-tests\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"tiny_for_tests.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.mark.test
@pytest.mark.parametrize(("kind", "is_installed"), [("right", True), ("another", False), ("none", False)])
def test_the_set_up_refuses_a_file_of_another_hash_and_a_lock_without_one(
    kind: str, is_installed: bool, tmp_path: Path
) -> None:
    """The set-up of Airflow's environment, from a lock of one package, which lies in a folder."""
    (tmp_path / "wheels").mkdir()
    digest = wheel(tmp_path / "wheels")
    for name in ("setup.sh", "pip_settings.py"):
        (tmp_path / "infra").mkdir(exist_ok=True)
        shutil.copy(ROOT / "infra" / name, tmp_path / "infra" / name)
    shutil.copytree(LOCKS, tmp_path / "infra" / "locks")
    shown = {"right": f" --hash={digest}", "another": f" --hash={SHA256}", "none": ""}[kind]
    (tmp_path / "infra" / "locks" / "airflow.txt").write_text(f"tiny-for-tests==1.0{shown}\n")
    (tmp_path / ".tools" / "bin").mkdir(parents=True)
    (tmp_path / ".tools" / "bin" / "uv").symlink_to(shutil.which(UV) or "uv")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment |= {"PYTHON": sys.executable, "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_NO_INDEX": "1"}
    environment |= {"UV_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [tmp_path / "infra" / "setup.sh", "airflow", tmp_path / "made"], env=environment, capture_output=True, text=True
    )
    installed = list((tmp_path / "made").glob("lib/*/site-packages/tiny_for_tests.py"))
    assert bool(installed) == is_installed, done.stderr
    assert done.returncode != 0, "there is no project in this folder"
    said = {"right": "pyproject.toml", "another": "Hash mismatch", "none": "must have a hash"}[kind]
    assert said in done.stderr


@pytest.mark.fast
def test_no_package_has_two_versions_in_a_lock() -> None:
    for name in NAMES:
        packages = [requirement.partition("==")[0] for requirement in lock(name)]
        assert len(packages) == len(set(packages)), name


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "python"), [("dev", "3.12"), ("dev", "3.13"), ("airflow", "3.12"), ("airflow", "3.13"), ("gpu", "3.12")]
)
def test_the_lock_resolves_for_newer_pythons(name: str, python: str, tmp_path: Path) -> None:
    """Needs a package index. torch is left out: its CPU build is on PyTorch's own index."""
    assert shutil.which(UV), "uv is installed by `make check` into .tools"
    requirements = [requirement for requirement in lock(name) if not requirement.startswith("torch==")]
    (tmp_path / "lock.txt").write_text("\n".join(requirements))
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
    missing = set(resolved.stdout.splitlines()) - {requirement.partition(" ;")[0] for requirement in requirements}
    assert missing == set()
