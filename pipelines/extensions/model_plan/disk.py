"""disk: version 0 of a run -> what its weights and checkpoints will take on each file system of this machine, and whether that fits."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pipelines.run.iterations import unfinished_iterations
from pipelines.run.kept_weights import checkpoint_files, version_sizes
from pipelines.run.run import Run
from stores.files import is_uri, local_path
from stores.weights.manifest import read_manifest
from train_loops.engine.state_sizes import checkpoint_bytes, version_bytes

KEPT_CHECKPOINTS = 2
"""A trainer keeps those of so many versions, and the champion's where rejections go back to it: the one before stays until the
new one is committed with its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """What a run will write to one file system beyond what it has written by now, and what is free there."""

    place: str
    needed_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"disk: weights and checkpoints will take up to {self.needed_bytes / 1e9:.1f} GB more at {self.place}, "
            f"{self.free_bytes / 1e9:.1f} GB are free"
        )


def disk_needs(run: Run) -> list[DiskNeed]:
    """Returns the need of every file system of this machine that the run's weights and checkpoints lie on.

    Raises ValueError before version 0 is there.
    """
    versions, checkpoints, scratch = 0, 0, 0
    num_kept = run.config.maintain.keep_versions + 1 + run.config.loop.max_lag
    released = min(run.config.maintain.keep_champions, -(-run.config.iterations // run.config.evaluate.every))
    limit = run.config.maintain.weights_limit_gb
    num_to_come, stored = len(unfinished_iterations(run)), version_sizes(run)
    for group, ref in run.trained(0).items():
        manifest = read_manifest(ref)
        train = run.config.train_config(group)
        num_trained = sum(prod(shape) for _, shape in manifest.tensors.values())
        version = version_bytes(train, num_trained)
        scratch += version
        existing = sum(size for (name, number), size in stored.items() if name == group and number > 0)
        all_versions = existing + num_to_come * version
        needed = min(all_versions, (num_kept + released) * version)
        versions += (all_versions if limit is None else max(needed, min(all_versions, int(limit * 1e9)))) - existing
        whole = manifest if manifest.base is None else read_manifest(manifest.base)  # what a critic is made of
        num_parameters = sum(prod(shape) for _, shape in whole.tensors.values())
        own_critic = num_parameters * (train.has_critic and train.critic.kind == "own")
        each = checkpoint_bytes(train, num_trained, own_critic)
        num_checkpoints = KEPT_CHECKPOINTS + (run.config.promote.on_reject == "champion")
        checkpoints += min(run.config.iterations, num_checkpoints) * each
    checkpoints -= sum(file.size_bytes for files in checkpoint_files(run).values() for file in files)
    by_device: dict[int, tuple[Path, int]] = {}
    sizes = {run.weights_uri: versions, f"{run.folder}/checkpoints": checkpoints, tempfile.gettempdir(): scratch}
    for place, size in sizes.items():
        if not is_uri(place):
            folder = _existing(local_path(place))
            device = os.stat(folder).st_dev
            first, before = by_device.get(device, (folder, 0))
            by_device[device] = (first, before + max(0, size))
    return [
        DiskNeed(place=str(folder), needed_bytes=size, free_bytes=shutil.disk_usage(folder).free)
        for folder, size in by_device.values()
    ]


def check_disk(run: Run) -> list[str]:
    """Returns a line for each file system that the run will write more than 1 GB to; ValueError where that does not fit."""
    needs = disk_needs(run)
    for need in needs:
        if need.needed_bytes > need.free_bytes:
            raise ValueError(
                f"{need}: free some, give the run another storage.root, or let fewer versions stay (maintain.keep_versions, "
                "maintain.keep_champions, maintain.weights_limit_gb)"
            )
    return [str(need) for need in needs if need.needed_bytes > 1e9]


def _existing(path: Path) -> Path:
    """Returns the path, or the nearest folder above it that is there."""
    return path if path.exists() else _existing(path.parent)
