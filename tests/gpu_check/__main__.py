"""Checks what Troupe does on GPUs, part by part, and writes runs/gpu-check/table.md: a table to paste into the documentation.

    python -m tests.gpu_check                     every part that this machine's GPUs suffice for (see parts.py)
    python -m tests.gpu_check --only shared       these
    python -m tests.gpu_check --model models/m    a real model in place of one of 100M parameters that is made on the spot
    python -m tests.gpu_check --rehearse          the same code on the CPU, with tiny models: says nothing about GPUs

Exit code 0: every part passed or was left out for lack of GPUs; 1: one failed; 3: there is no GPU (`make gpu-check` shows
the 3 and ends with make's own 2).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.gpu_check.memory import Gpu, gpus
from tests.gpu_check.parts import PARTS, left_out
from tests.gpu_check.rows import Outcome, Row, markdown

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "runs" / "gpu-check" / "table.md"
NO_GPU = 3
PART_TIMEOUT_S = 1800


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", default="", metavar="FOLDER", help="a model in Hugging Face layout")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny models")
    parser.add_argument("--out", type=Path, default=TABLE, metavar="FILE", help="where the table is written")
    parser.add_argument("--child", nargs=2, metavar=("PART", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return _child(args.child[0], Path(args.child[1]), model=args.model, on_gpu=not args.rehearse)
    found = gpus()
    if not found and not args.rehearse:
        print("gpu-check: no GPU here (nvidia-smi shows none), nothing was checked", file=sys.stderr)
        return NO_GPU
    outcomes: dict[str, Outcome] = {}
    for name in args.only or PARTS:
        reason = "" if args.rehearse else left_out(PARTS[name], len(found))
        outcomes[name] = Outcome(verdict="left out", reason=reason) if reason else _run(name, args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(markdown(outcomes, machine=_machine(found, rehearsed=args.rehearse)))
    print(f"\n{args.out.read_text()}\n{args.out}")
    return int(any(outcome.verdict == "failed" for outcome in outcomes.values()))


def _run(name: str, args: argparse.Namespace) -> Outcome:
    """One part in a process group of its own, so that the GPU is free when the next one starts."""
    print(f"gpu-check: {name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="troupe-gpu-") as scratch:
        out = Path(scratch) / "rows.jsonl"
        command = [sys.executable, "-m", "tests.gpu_check", "--child", name, str(out), "--model", args.model]
        command += ["--rehearse"] if args.rehearse else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=PART_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        rows = [Row(**json.loads(line)) for line in out.read_text().splitlines()] if out.is_file() else []
    if code == 0:
        return Outcome(verdict="passed", rows=rows)
    after = f"after {rows[-1].stage}" if rows else "before the first stage"
    reason = f"no end after {PART_TIMEOUT_S} s" if code is None else f"exit code {code}, see its output"
    return Outcome(verdict="failed", reason=f"{reason}, {after}", rows=rows)


def _child(name: str, out: Path, *, model: str, on_gpu: bool) -> int:
    from tests.gpu_check.loop import play

    cores = len(os.sched_getaffinity(0))
    model = str(Path(model).resolve()) if model else ""
    with tempfile.TemporaryDirectory(prefix="troupe-gpu-") as folder, out.open("w") as file:
        for row in play(name, PARTS[name], Path(folder), model=model, on_gpu=on_gpu, num_cores=cores):
            file.write(json.dumps(row.to_dict()) + "\n")
            file.flush()
            print(f"  {row}", flush=True)
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a part's process group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
            time.sleep(0.5)
    process.wait()


def _machine(found: list[Gpu], *, rehearsed: bool) -> str:
    cards = " and ".join(f"{gpu.name} ({gpu.total_gib:.0f} GiB)" for gpu in found) or "no GPU"
    what = "Rehearsed on the CPU, which says nothing about GPUs" if rehearsed else "GPU check"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{what}: {cards}, {os.cpu_count()} cores, Python {platform.python_version()}, commit {commit}."


if __name__ == "__main__":
    sys.exit(main())
