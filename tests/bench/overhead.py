"""overhead: the share of an iteration that is neither sampling (evaluation included) nor training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines.config.run_config import load_config
from pipelines.report.progress import Screen
from pipelines.runners.local_runner import train_team
from pipelines.stages.promote import git_commit
from tests.bench.figures import Figure
from tests.bench.setting import DEMO, ROOT, SHORT_WARMSTART

ITERATIONS = 3
LIMIT = 0.25


def measure(folder: Path) -> list[Figure]:
    """From the report of `make demo` if it was run at this commit, else from three iterations of the same shape."""
    finished = ROOT / "runs" / "demo" / "report.json"
    report = json.loads(finished.read_text()) if finished.is_file() else {}
    source = f"runs/demo, {report.get('iterations')} iterations"
    if not report or report["commit"] != git_commit():
        changes: dict[str, Any] = {
            "run": "bench-overhead",
            "storage": {"root": str(folder)},
            "iterations": ITERATIONS,
            "evaluate.every": 2,
            **SHORT_WARMSTART,
        }
        report = train_team(load_config(DEMO, changes), screen=Screen())
        source = f"{ITERATIONS} iterations of the demo's shape"
    shares = report["overhead_share"][1:]
    each = ", ".join(f"{share:.0%}" for share in shares)
    seconds = ", ".join(f"{stage} {s:.1f}" for stage, s in report["seconds"].items())
    return [
        Figure("largest share from iteration 2 on", max(shares), most=LIMIT, note=f"{source}: {each}"),
        Figure("mean share from iteration 2 on", sum(shares) / len(shares), note=f"seconds: {seconds}"),
    ]
