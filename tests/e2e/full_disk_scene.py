"""full_disk_scene: ROOT STAGE -> `troupe train` on a disk that is full from STAGE of iteration 1 on, and again once there is room.

Runs in a mount namespace of its own, see test_full_disk.py. Leaves the runs in ROOT-after, for what they hold.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from pipelines.run.run import Run
from tests.e2e.local_runs import DEADLINE_S, config_in, is_running, kill_tree, start


def fill(folder: Path) -> None:
    """Takes whatever room there is."""
    try:
        with (folder / "filling").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError:
        with (folder / "filling").open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                return


def ends_on_a_full_disk(process: subprocess.Popen[bytes], root: Path, stage: str) -> int:
    """Fills the disk when the stage begins, and keeps it full; returns the exit code."""
    run, deadline = Run(config_in(root), is_read_only=True), time.monotonic() + DEADLINE_S
    groups = [""] if stage != "train" else list(run.config.model_groups)
    journal = Path(run.folder, "journal.db")
    while not (journal.is_file() and journal.stat().st_size and any(is_running(run, 1, stage, g) for g in groups)):
        assert process.poll() is None and time.monotonic() < deadline, "the stage never began"
        time.sleep(0.2)
    while process.poll() is None and time.monotonic() < deadline:
        fill(root)
        time.sleep(0.05)
    kill_tree(process.pid)
    return process.wait(timeout=30)


def main() -> None:
    """Prints {"first", "second": exit codes, "said": the end of the first log} as JSON."""
    root, stage = Path(sys.argv[1]), sys.argv[2]
    log, second_log = root.with_name("first.log"), root.with_name("second.log")
    first = ends_on_a_full_disk(start(root, log), root, stage)
    (root / "filling").unlink()
    process = start(root, second_log)
    try:
        second = process.wait(timeout=DEADLINE_S)
    finally:
        kill_tree(process.pid)
    shutil.copytree(root, root.with_name(f"{root.name}-after"))
    said = [line for line in log.read_text().splitlines() if line.startswith("troupe: ")]
    print(json.dumps({"first": first, "second": second, "said": said}))


if __name__ == "__main__":
    main()
