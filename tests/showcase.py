"""showcase: every shipped workflow, trained from nothing -> a table of what it learned. `make workflows` runs it.

    infra/workflows/*.yaml ──troupe train──> runs/workflows/<name>/report.json ──> runs/workflows/table.md

What is finished is kept: a row is made again only where its config has changed. Warm starts are kept as runs keep them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipelines.config.run_config import load_config

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "infra" / "workflows").glob("*.yaml"))
RUNS = ROOT / "runs" / "workflows"
TIMEOUT_S = 2400


def main() -> int:
    """Trains what is missing; the number of workflows that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.showcase", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[c.stem for c in CONFIGS], metavar="NAME")
    args = parser.parse_args()
    failed = []
    for config in CONFIGS:
        if args.only and config.stem not in args.only:
            continue
        if not _is_done(config):
            print(f"== {config.stem}", flush=True)
            failed += [] if _train(config) else [config.stem]
    table = _table()
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "table.md").write_text(table)
    print(table)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


def _folder(config: Path) -> Path:
    """One per config as it is, so that a changed one begins anew."""
    loaded = load_config(config)
    return RUNS / f"{loaded.run}-{loaded.sha256[:8]}"


def _is_done(config: Path) -> bool:
    return (_folder(config) / "seconds.json").is_file()


def _train(config: Path) -> bool:
    folder = _folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).parent / "troupe"), "train", str(config), "--set", f"storage.root={folder}"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, timeout=TIMEOUT_S, check=False)
    if done.returncode == 0:
        (folder / "seconds.json").write_text(json.dumps({"wall": time.monotonic() - began}))
    return done.returncode == 0


def _table() -> str:
    lines = [
        "| workflow | before | after | change, 95% interval | iterations | minutes (warm start) | what it is |",
        "|---|---|---|---|---|---|---|",
    ]
    for config in CONFIGS:
        path = _folder(config) / config.stem / "report.json"
        report = json.loads(path.read_text()) if path.is_file() else {}
        about = config.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(
            _row(config.stem, report, about)
            if report.get("delta_ci95")  # not yet in that of a run that was stopped
            else f"| {config.stem} | | | | | | {about} |"
        )
    return "\n".join(lines) + "\n"


def _row(name: str, report: dict[str, Any], about: str) -> str:
    before, after, (low, high) = report["before"], report["after"], report["delta_ci95"]
    seconds = report["seconds"]
    return (
        f"| {name} | {before['accuracy']:.3f} | {after['accuracy']:.3f} | {report['delta']:+.3f} [{low:+.3f}, {high:+.3f}] "
        f"| {report['iterations']} | {seconds['iterations'] / 60:.1f} ({seconds['warmstart'] / 60:.1f}) | {about} |"
    )


if __name__ == "__main__":
    sys.exit(main())
