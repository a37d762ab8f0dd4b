"""Runs the benchmarks one after the other, each in a process of its own, and writes runs/bench/report.json.

    python -m tests.bench                    all of them
    python -m tests.bench --only cli sync    these; the others keep their last figures in the report

A limit that is missed is shown, not raised; the exit code is 1 only if a benchmark crashed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench.figures import Figure, figures_table

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "runs" / "bench" / "report.json"
BENCHES = {
    "cli": "tests.bench.command_line",
    "traces": "tests.bench.trace_store",
    "growth": "tests.bench.growth",
    "controllers": "tests.bench.controllers",
    "sync": "tests.bench.weight_sync",
    "adapters": "tests.bench.adapters",
    "overhead": "tests.bench.overhead",
    "overlap": "tests.bench.overlap",
    "rollout": "tests.bench.rollout",
    "sampling": "tests.bench.sampling",
    "sandbox": "tests.bench.sandbox",
    "worlds": "tests.bench.worlds",
    "train": "tests.bench.training",
    "merging": "tests.bench.merging",
    "trl": "tests.bench.against_trl",
    "airflow": "tests.bench.airflow_stages",
    "gate": "tests.bench.gate",
    "gateway": "tests.bench.gateway",
    "hostile": "tests.bench.hostile",
    "traffic": "tests.bench.traffic",
    "promotion": "tests.bench.promotion",
    "malformed": "tests.bench.malformed_calls",
}
"""Each module has `measure(folder) -> list[Figure]`; `folder` is empty and removed afterwards."""
TIMEOUT_S = 1800


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHES), metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return _child(*args.child)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the running benchmark is ended before this process
    console = Console()
    console = console if console.is_terminal else Console(width=150)
    report = _last_report() if args.only else {"benches": {}}
    for name in args.only or BENCHES:
        console.rule(name)
        entry = _run(name)
        report["benches"] = _ordered({**report["benches"], name: entry})
        report |= {"commit": entry["commit"], "cores": entry["cores"], "written_at": time.time()}
        report["missed"] = _missed(report["benches"])
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        REPORT.write_text(json.dumps(report, indent=2))
        console.print(figures_table({name: entry}))
    console.rule()
    console.print(figures_table(report["benches"]))
    console.print(f"missed limits: {', '.join(report['missed']) or 'none'}")
    console.print(str(REPORT.relative_to(ROOT)))
    return int(any(entry["error"] for entry in report["benches"].values()))


def _run(name: str) -> dict[str, Any]:
    """One benchmark in its own process (group), so that nothing of it is left when the next one starts."""
    began = time.perf_counter()
    error, figures = "", []
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as scratch:
        out = Path(scratch) / "figures.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench", "--child", name, str(out)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            error = f"no end after {TIMEOUT_S} s"
        except KeyboardInterrupt:
            _end(process)
            raise
        else:
            error = "" if code == 0 else f"exit code {code}: see its output above"
        _end(process)
        if out.is_file():
            figures = json.loads(out.read_text())
    return {
        "figures": figures,
        "error": error,
        "seconds": time.perf_counter() - began,
        "commit": _commit(),
        "cores": os.cpu_count(),
        "written_at": time.time(),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a benchmark's process group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        time.sleep(0.5)
    process.wait()


def _child(name: str, out: str) -> int:
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as scratch:
        figures: list[Figure] = importlib.import_module(BENCHES[name]).measure(Path(scratch))
    Path(out).write_text(json.dumps([figure.to_dict() for figure in figures]))
    return 0


def _last_report() -> dict[str, Any]:
    return json.loads(REPORT.read_text()) if REPORT.is_file() else {"benches": {}}


def _ordered(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entries[name] for name in BENCHES if name in entries}


def _missed(entries: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {figure['name']}"
        for name, entry in entries.items()
        for figure in entry["figures"]
        if figure["verdict"] == "MISSED"
    ]


def _python_path() -> list[str]:
    return [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
