"""stage_on_full_disk: FOLDER -> a stage that stores episodes until the disk is full, and the same stage again once there is room.

Prints what each of the two said as JSON lines. The journal lies on the same disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from records import build_trace

from stores.journal.journal import Journal, Lease, StageKey
from stores.journal.sqlite import sqlite_url
from stores.traces.store import TraceStore
from stores.types import Purpose

KEY = {"run_id": "run", "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
NUM_EPISODES = 40
STAGE = StageKey("run", 1, "collect")


def work(folder: Path, *, fills_after: int | None) -> dict[str, Any]:
    """Stores the episodes that are missing, four at a time; the disk is full after so many of them."""
    store = TraceStore(str(folder / "traces"))
    store.create()
    stored = store.stored_ids(**KEY)
    missing = [trace for i in range(NUM_EPISODES) if (trace := build_trace(i, **KEY)).episode_id not in stored]
    for start in range(0, len(missing), 4):
        if fills_after is not None and start >= fills_after:
            subprocess.run("cat /dev/zero > filling", shell=True, cwd=folder, stderr=subprocess.DEVNULL)
        store.write_episodes(missing[start : start + 4])
    ref = store.pin_episodes(**KEY)
    return {"was_stored": len(stored), "num_episodes": ref.num_episodes}


def main() -> None:
    """Runs the stage in this process; `FOLDER full` fills the disk on the way."""
    folder = Path(sys.argv[1])
    fills_after = 20 if sys.argv[2:] == ["full"] else None
    if sys.argv[2:] == ["both"]:
        for part in (["full"], []):
            subprocess.run([sys.executable, __file__, folder, *part], check=True)
            (folder / "filling").unlink(missing_ok=True)
        return
    journal = Journal(sqlite_url(folder / "journal.db"))

    def stage(lease: Lease) -> dict[str, Any]:
        return work(folder, fills_after=fills_after)

    try:
        print(json.dumps(journal.once(STAGE, stage)), flush=True)
    except OSError as error:
        print(json.dumps({"errno": error.errno, "file": error.filename}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
