"""report: what came of each cell, kept in runs/chaos/report.json as soon as it is known, and shown as a table."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from pipelines.stages.table import STAGES
from tests.chaos.victims import VICTIMS

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "runs" / "chaos" / "report.json"


@dataclass(kw_only=True)
class Cell:
    """One victim killed once in one stage."""

    victim: str
    stage: str
    number: int
    """Of the moment, from 0."""
    share: float
    """Wanted moment, as share of the stage's usual seconds."""
    iteration: int
    run: str = ""
    """Folder of the run, one of several in runs/chaos."""
    after_s: float = 0.0
    """When it was killed: seconds after the stage began."""
    killed: list[str] = field(default_factory=list)
    """Titles of the processes; of a node or cluster how many of which kind."""
    spread: dict[str, int] = field(default_factory=dict)
    """Of a lost node: on how many nodes each kind of worker was."""
    seconds: float | None = None
    """From the kill to the end of the stage; None where it never came."""
    recovered_by: str = ""
    """`itself`, `same command`, `Airflow retry`."""
    num_restarts: int = 0
    num_kept: int = 0
    """Finished episodes at the kill."""
    checks: dict[str, str] = field(default_factory=dict)
    """Fault by check; empty: none."""
    error: str = ""
    commit: str = ""
    cores: int = 0
    at: float = 0.0
    """Unix seconds."""

    @property
    def name(self) -> str:
        """Key in the report."""
        return f"{self.victim}/{self.stage}/{self.number}"

    @property
    def verdict(self) -> str:
        """`ok` or `FAILED`."""
        return "ok" if self.seconds is not None and not self.error and not any(self.checks.values()) else "FAILED"


class Report:
    """The cells so far."""

    def __init__(self, path: Path = REPORT) -> None:
        self.path = path
        data = json.loads(path.read_text()) if path.is_file() else {"cells": {}}
        self.data: dict[str, Any] = data
        self.cells = {name: _cell(values) for name, values in data["cells"].items()}

    def has(self, victim: str, stage: str, number: int) -> bool:
        """Whether a cell is done: one that failed is played again."""
        cell = self.cells.get(f"{victim}/{stage}/{number}")
        return cell is not None and cell.verdict == "ok"

    def keep(self, cells: Sequence[Cell], **facts: Any) -> None:
        """Writes cells and facts of the whole."""
        for cell in cells:
            cell.commit, cell.cores, cell.at = _commit(), os.cpu_count() or 0, time.time()
            self.cells[cell.name] = cell
        written = {name: asdict(cell) | {"verdict": cell.verdict} for name, cell in sorted(self.cells.items())}
        self.data |= {"commit": _commit(), "cores": os.cpu_count(), **facts, "cells": written}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.data, indent=1))
        scratch.replace(self.path)

    def table(self) -> Table:
        """Victim x stage: seconds to recover, and by what."""
        table = Table(
            title="Seconds from the blow (kill -9 where none is named) to the end of the stage (c: same command given again, a: Airflow retry)",
            title_justify="left",
        )
        table.add_column("victim")
        for stage in STAGES:
            table.add_column(stage, justify="right")
        for victim in VICTIMS:
            table.add_row(victim.name, *(self._shown(victim.name, stage) for stage in STAGES))
        usual = self.data.get("usual_seconds", {})
        table.add_section()
        table.add_row("nothing (usual seconds)", *(f"{usual[s]:.1f}" if s in usual else "" for s in STAGES))
        return table

    def _shown(self, victim: str, stage: str) -> str:
        if stage not in next(v.stages for v in VICTIMS if v.name == victim):
            return "-"
        found = [cell for cell in self.cells.values() if (cell.victim, cell.stage) == (victim, stage)]
        if not found:
            return ""
        worst = max(found, key=lambda cell: (cell.verdict != "ok", cell.seconds or 0.0))
        if worst.verdict != "ok":
            return "[bold red]FAILED[/]"
        mark = {"same command": " c", "Airflow retry": " a"}.get(worst.recovered_by, "")
        return f"{worst.seconds:.1f}{mark}"


def _cell(values: dict[str, Any]) -> Cell:
    return Cell(**{name: value for name, value in values.items() if name != "verdict"})


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
