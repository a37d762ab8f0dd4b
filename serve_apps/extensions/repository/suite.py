"""suite: the files of a repository -> what its tests say, each time in a child of a kept sandbox in which pytest is imported.

What comes out is hostile: code of a policy runs in the same process as the tests. `grading` asks twice, and what it asks the second
time must fail.
"""

from __future__ import annotations

import atexit
import base64
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from serve_apps.extensions.sandbox import Program, Sandbox
from serve_apps.extensions.sandbox.config import SandboxConfig
from serve_apps.extensions.sandbox.sandbox import KeptSandbox

PROGRAM = Path(__file__).with_name("suite_program.py").read_text()
DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
"""What pytest consists of."""
LIMITS = SandboxConfig(
    time_s=30, max_time_s=30, memory_mib=512, processes=32, output_kib=4096, scratch_mib=64, open_files=256
)
SHARED = "/var/tmp"
"""Where the sandbox finds pytest: not below /tmp, which is the sandbox's own."""
PRELUDE = """
import gc, importlib, pkgutil, sys
sys.path.insert(0, {folder!r})
import _pytest, pytest
for module in pkgutil.iter_modules(_pytest.__path__):
    importlib.import_module("_pytest." + module.name)
gc.collect()
gc.freeze()
"""
"""pytest imports most of its modules when it runs: here they come once, before the fork. pytest collects garbage five times at its
end: what is frozen is not looked at, which halves a run of few tests."""
MAX_KEPT = 4096
"""The number of results that are remembered: episodes of one task often come to the same tree."""

Files = Mapping[str, bytes]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun:
    """What the tests of a repository said."""

    outcomes: Mapping[str, str] = field(default_factory=dict)
    """By test (`tests/test_x.py::test_y`): passed, failed, skipped or error."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """Why a test failed, in a line or two."""
    fault: str = ""
    """Why there are no outcomes: too slow, too much memory, or an end before the end."""


class Suite:
    """Runs tests. For one thread."""

    def __init__(self, kept: KeptSandbox) -> None:
        self._kept = kept
        self._made: dict[str, Any] = {}

    def remembered(self, key: Any, make: Callable[[], T]) -> T:
        """Returns what was made for this key before, or makes it."""
        name = sha256(repr(key).encode()).hexdigest()
        if name not in self._made:
            if len(self._made) >= MAX_KEPT:
                self._made.clear()
            self._made[name] = make()
        made: T = self._made[name]
        return made

    def run(self, files: Files, selected: Sequence[str]) -> SuiteRun:
        """Returns the outcomes of the selected tests or test files. Args: files: by path, `/` between its parts.

        Raises SandboxUnavailable where no sandbox starts.
        """
        nonce = secrets.token_hex(16)
        ran = self._kept.run([nonce, {path: _sent(content) for path, content in files.items()}, list(selected)])
        value = ran.value if ran.has_value else None
        if ran.status != "ended" or not isinstance(value, dict) or value.get("nonce") != nonce:
            fault = {"time": "they took too long", "memory": "they took too much memory"}.get(ran.status)
            return SuiteRun(fault=fault or "they ended before their end")
        return SuiteRun(outcomes=_texts(value.get("outcomes")), messages=_texts(value.get("messages")))


@contextmanager
def suite(sandbox: SandboxConfig = LIMITS, site: str = "") -> Iterator[Suite]:
    """Gives a suite, whose sandbox starts with the first run and ends with the block.

    Args: site: a folder of packages that tests may import, pytest among them; empty: pytest alone, as it is installed here.

    Raises ValueError where pytest is installed nowhere.
    """
    folder = site or _site_of_pytest()
    walled = Sandbox(sandbox.model_copy(update={"readable": (*sandbox.readable, folder)}))
    with walled.kept(Program(code=PROGRAM, fn_name="run", prelude=PRELUDE.format(folder=folder))) as kept:
        yield Suite(kept)


@cache
def shared_suite(sandbox: SandboxConfig, site: str) -> Suite:
    """Returns the suite that all worlds of this process share. Its sandbox ends with the process."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(suite(sandbox, site))


def _site_of_pytest() -> str:
    """Returns a folder with pytest, which any user may read; where it is installed, others may not.

    It stays for the next process: one folder per user and version. That of another user is not used.
    """
    version = "-".join(_version_of(name) for name in DISTRIBUTIONS)
    folder = Path(SHARED, f"troupe-pytest-{os.geteuid()}-{version}")
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix="troupe-pytest-", dir=SHARED))
        made.chmod(0o755)
        for name in DISTRIBUTIONS:
            for file in metadata.files(name) or []:
                if file.parts[0] != ".." and file.suffix != ".pyc":
                    target = made / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file.locate(), target)
        try:
            made.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(made)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ValueError(f"{folder} belongs to another user: have it removed, or name a folder of packages (`site`)")
    return str(folder)


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"the tests of a repository run with pytest, and {name} is not installed here: pip install pytest, or name a folder of "
            "packages that has it (`site`)"
        ) from None


def _sent(content: bytes) -> Any:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _texts(value: Any) -> dict[str, str]:
    """Returns a mapping of texts, whatever a hostile program has put in its place."""
    return {str(key): str(text) for key, text in value.items()} if isinstance(value, dict) else {}
