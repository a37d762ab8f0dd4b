"""locks: the name of a lock of infra/locks -> what it installs, as `make lock` reads it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "infra" / "locks"


def script(name: str) -> ModuleType:
    """A script of infra/, which is no package's module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "infra" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lock(name: str) -> dict[str, list[str]]:
    """`name==version`, with its marker -> the hashes of its files."""
    return script("merge_locks").read((LOCKS / f"{name}.txt").read_text())
