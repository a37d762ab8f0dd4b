"""cli: how soon the command line answers."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.figures import Figure
from tests.bench.setting import DEMO, ROOT

NUM_CALLS = 5


def measure(folder: Path) -> list[Figure]:
    """Median wall seconds of `troupe --help` and `troupe validate`."""
    troupe = str(Path(sys.executable).parent / "troupe")
    return [
        _seconds("troupe --help", [troupe, "--help"], limit=0.5),
        _seconds("troupe validate demo.yaml", [troupe, "validate", str(DEMO.relative_to(ROOT))], limit=1.0),
    ]


def _seconds(name: str, command: list[str], *, limit: float) -> Figure:
    seconds = []
    for _ in range(NUM_CALLS + 1):
        began = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return Figure(
        name,
        statistics.median(seconds[1:]),
        "s",
        most=limit,
        note=f"median of {NUM_CALLS} after one that fills the file cache",
    )
