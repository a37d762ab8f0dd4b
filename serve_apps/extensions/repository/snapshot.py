"""snapshot: a folder -> its files by path; and which of them a change must leave alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

MAX_BYTES = 16 << 20
"""Of all files of a repository together."""
LEFT_OUT = {".git", "__pycache__", ".venv", "node_modules"}
SETTINGS = {
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pyproject.toml",
    "setup.cfg",
    "tox.ini",
    "pytest.toml",
    ".pytest.toml",
}
"""Files that tell pytest what to do."""
START = {"sitecustomize", "usercustomize", "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"}
"""Modules that Python or pytest import by themselves."""
TESTS = ("test_*.py", "*_test.py", "test.py", "tests.py")
"""Names of files with tests; the first two are those that pytest collects."""


def read_snapshot(folder: str | Path) -> dict[str, bytes]:
    """Returns the files of a folder by their paths in it.

    Raises ValueError for a link that leads out of the folder, for special files, and for more than `MAX_BYTES`.
    """
    root = Path(folder).resolve()
    if not root.is_dir():
        raise ValueError(f"snapshot {folder}: there is no such folder")
    files: dict[str, bytes] = {}
    num_bytes = 0
    for here, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        for name in [*names, *(name for name in folders if Path(here, name).is_symlink())]:
            path = Path(here, name)
            if not path.resolve().is_relative_to(root):
                raise ValueError(
                    f"snapshot {folder}: {path.relative_to(root)} is a link to {os.readlink(path)}, out of it"
                )
            if path.is_dir():
                continue
            if not path.is_file():
                raise ValueError(f"snapshot {folder}: {path.relative_to(root)} is no file that can be read")
            num_bytes += path.stat().st_size
            if num_bytes > MAX_BYTES:
                raise ValueError(f"snapshot {folder}: its files have more than {MAX_BYTES >> 20} MiB")
            files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files


def with_patch(files: Mapping[str, bytes], patch: str) -> dict[str, bytes]:
    """Returns the files after a patch in the form of `git diff`. Raises ValueError where it does not apply."""
    if not patch.strip():
        return dict(files)
    with tempfile.TemporaryDirectory(prefix="troupe-patch-") as folder:
        for path, content in files.items():
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
        try:
            done = subprocess.run(
                command, input=patch.encode(), cwd=folder, capture_output=True, timeout=60, env=environment, check=False
            )
        except FileNotFoundError:
            raise ValueError("a patch is applied by git, which is not installed here") from None
        if done.returncode:
            raise ValueError(f"the patch does not apply: {done.stderr.decode(errors='replace').strip()[-500:]}")
        return read_snapshot(folder)


def is_test(path: str) -> bool:
    """Whether a file holds tests, by its name."""
    return any(fnmatchcase(PurePosixPath(path).name, pattern) for pattern in TESTS)


def is_protected(path: str, files: Mapping[str, bytes]) -> bool:
    """Whether a change of a file could decide how it is judged: a test, a setting of pytest or Python, a module that hides one of theirs.

    Args: files: those of the repository before the change.
    """
    pure = PurePosixPath(path)
    top = pure.parts[0].partition(".")[0]
    hides = path not in files and top in sys.stdlib_module_names
    return (
        pure.name in SETTINGS
        or pure.suffix in (".pth", ".so", ".pyc")
        or is_test(path)
        or bool({"test", "tests"} & set(pure.parts[:-1]))
        or top in START
        or hides
    )
