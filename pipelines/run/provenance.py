"""provenance: a team that is registered -> where it comes from: pinned data, who made it, commits of the code."""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.cluster.owner_links import owner_links, stage_owner
from pipelines.run.run import Run, plain
from stores.journal.stage_results import Collected, Scored
from stores.types import ModelVersionRef


def provenance_of(run: Run, models: Mapping[str, ModelVersionRef], iteration: int) -> dict[str, Any]:
    """How a team came to be, as its manifest records it; JSON values.

    `data` holds by model group what its version was trained on, `links` the DAG run and the Ray jobs of the iteration.
    """
    return {
        "made_by": stage_owner(),
        "links": owner_links(run.journal.stages(run.run_id, iteration)),
        "workflow_commit": commit_of(Path(inspect.getfile(type(run.workflow))).parent),
        "data": {group: data for group, ref in models.items() if (data := _trained_on(run, ref)) is not None},
    }


def git_commit() -> str:
    """Commit of the code that runs, from TROUPE_COMMIT (images set it) or git; empty where neither knows it."""
    return os.environ.get("TROUPE_COMMIT", "") or _git(Path(__file__).parent, "rev-parse", "HEAD")


def commit_of(folder: Path) -> str:
    """Commit of the checkout that a folder is in, `-dirty` where files differ from it; empty where there is none."""
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: Path, *arguments: str) -> str:
    try:
        answer = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return answer.stdout.strip()


def _trained_on(run: Run, ref: ModelVersionRef) -> dict[str, Any] | None:
    """The pinned data that a version was trained on, possibly another run's traces.

    A version bears the number of its iteration. None for version 0, and where the iteration's stages are not known.
    """
    iteration = run.iteration(ref.version)
    collected, scored = iteration.find(Collected), iteration.find(Scored)
    if not ref.version or collected is None or scored is None:
        return None
    return {
        "iteration": ref.version,
        "traces": plain(collected.traces),
        "rewards": plain(scored.rewards),
        "credit_version": scored.credit_version,
    }
