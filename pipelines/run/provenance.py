"""provenance: a team that is registered -> where it comes from: pinned data, who made it, commits of the code."""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.cluster.owner_links import links, stage_owner
from pipelines.run.run import Run
from stores.types import ModelVersionRef


def provenance_of(run: Run, models: Mapping[str, ModelVersionRef], iteration: int) -> dict[str, Any]:
    """Returns how a team came to be, for its manifest; JSON values.

    `data` holds by model group what its version was trained on, `links` the DAG run and the Ray jobs of the iteration.
    """
    return {
        "made_by": stage_owner(),
        "links": links(run.journal.stages(run.run_id, iteration)),
        "workflow_commit": commit_of(Path(inspect.getfile(type(run.workflow))).parent),
        "data": {group: data for group, ref in models.items() if (data := _data(run, ref)) is not None},
    }


def git_commit() -> str:
    """Commit of the code that runs (an image says it in TROUPE_COMMIT), empty outside a checkout and without git."""
    return os.environ.get("TROUPE_COMMIT", "") or _git(Path(__file__).parent, "rev-parse", "HEAD")


def commit_of(folder: Path) -> str:
    """Commit of the checkout that a folder is in, `-dirty` where files differ from it; empty where there is none."""
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: Path, *arguments: str) -> str:
    try:
        found = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def _data(run: Run, ref: ModelVersionRef) -> dict[str, Any] | None:
    """What a version was trained on; the traces may be another run's. It bears the number of its iteration. None for version 0, and where that is not known."""
    collected = run.journal.ref(run.key(ref.version, "collect"))
    scored = run.journal.ref(run.key(ref.version, "score"))
    if not ref.version or collected is None or scored is None:
        return None
    return {
        "iteration": ref.version,
        "traces": collected["traces"],
        "rewards": scored["rewards"],
        "credit_version": scored.get("credit_version"),
    }
