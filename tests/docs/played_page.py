"""played_page: a page of the documentation -> its files written, its commands run and its cells executed, in the order of the page."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.docs.markdown_pages import ROOT, fences

SHORT = {
    "iterations": 1,
    "warmstart.num_demonstrations": 400,
    "warmstart.num_epochs": 1,
    "collect.tasks_per_iteration": 4,
    "collect.episodes_per_task": 2,
    "evaluate.every": 1,
}
"""A run that shows that a page holds, not that a team learns."""
LEFT_OUT = {"source ": "the environment of the tests is active", "mlflow ui": "a server that does not end"}
"""Commands that are not run, by their beginnings."""
ID = re.compile(r"\b[0-9a-f]{12}\b")
UNDECIDED = (0, 10, 11)
"""What a command with `--exit-code` may end with."""


def clone_into(folder: Path) -> Path:
    """Copies the files that git tracks, or would add, so that nothing which a page changes is this checkout's."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for path in filter(lambda name: (ROOT / name).is_file(), listed):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@dataclass
class Reader:
    """Follows pages word for word, but for what is named here."""

    clone: Path
    """Where `make` is run, and where the reader begins."""
    swaps: dict[str, str] = field(default_factory=dict)
    """Parts of commands that are others here (ports, the name of a run)."""
    more: Mapping[str, str] = field(default_factory=dict)
    """What is added to commands, by their beginnings, so that they end sooner."""
    environment: Mapping[str, str] = field(default_factory=dict)
    shown: str = ""
    """What the last command printed."""

    def __post_init__(self) -> None:
        self.folder = self.clone
        own = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": f"{self.clone}:{ROOT}"}
        self._environment = os.environ | own | {"TROUPE_CACHE": str(self.clone / ".cache")} | self.environment

    def follow(self, page: str) -> None:
        """Writes each block that the text before names as a file (or adds it to one), and runs each command.

        What follows "prints" must be what the last command printed.
        """
        for fence in fences(f"infra/docs/tutorials/{page}"):
            if fence.language == "console":
                for line in fence.text.replace("\\\n", " ").splitlines():
                    self.run(line.removeprefix("$ "), at=str(fence))
            elif fence.file:
                file = self.folder / fence.file
                added = file.read_text() + "\n\n" if fence.before.endswith(f"Add to `{fence.file}`:") else ""
                file.write_text(added + fence.text)
            elif fence.before == "prints":
                assert self.shown == fence.text, str(fence)

    def run(self, command: str, *, at: str = "") -> None:
        """Runs a command where the reader is. Ids that differ from run to run are those of the last list."""
        for said, meant in self.swaps.items():
            command = command.replace(said, meant)
        if command.startswith("troupe show") and (given := re.match(r"troupe show (EPISODE|[0-9a-f]{12})", command)):
            found = ID.search(self.shown)
            assert found, f"{at}: no episode is listed: {self.shown}"
            command = command.replace(given[1], found[0])
        if command.startswith("cd "):
            self.folder /= command.removeprefix("cd ")
        if command.startswith(("cd ", *LEFT_OUT)):
            return
        command += next((more for begin, more in self.more.items() if command.startswith(begin)), "")
        # Targets need no set-up: the environment of the tests is there.
        command = re.sub(r"^make ", "make -o .venv/.cpu -o .venv/.dev ", command)
        where = self.clone if command.startswith("make ") else self.folder
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=where,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        ends = UNDECIDED if "--exit-code" in command else (0,)
        assert done.returncode in ends, f"{at}: {command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        self.shown = done.stdout


def run_cells(page: str) -> dict[str, Any]:
    """Runs the Python blocks of a page as a notebook does, one after another while an event loop runs; returns its variables."""
    cells = [fence for fence in fences(f"infra/docs/tutorials/{page}") if fence.language == "python"]
    variables: dict[str, Any] = {"__name__": "__main__"}

    async def kernel() -> None:
        for cell in cells:
            exec(compile(cell.text, str(cell), "exec"), variables)

    asyncio.run(kernel())
    return variables
