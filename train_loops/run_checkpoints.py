"""run_checkpoints: what a model group's training keeps of each version beside its weights, stored through Ray Train.

    engines, `CarriedState` --store_state--> <run folder>/<model group>-v<version>-<random> --resume--> engines of any layout

Worker 0 writes the files (checkpoints.py); on a disk they are written where they stay: a copy of the optimizer's state
would take as long as writing it.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stores.files import is_uri
from train_loops.config import LossConfig
from train_loops.train_job import TrainJob

if TYPE_CHECKING:
    from train_loops.models import Models


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedState:
    """What a model group's training keeps from job to job beside weights and moments."""

    kl_coef: float
    """In the reward; adapted where `loss.adaptive_kl` is set."""
    num_critic_jobs: int = 0

    def resumed(self, stored: Mapping[str, Any], loss: LossConfig) -> CarriedState:
        """As a checkpoint has it; a coefficient that is not adapted is the setting's."""
        kl_coef = stored["kl_coef"] if loss.adaptive_kl is not None else self.kl_coef
        return CarriedState(kl_coef=kl_coef, num_critic_jobs=stored["num_critic_jobs"])


def store_state(models: Models, state: CarriedState, *, job: TrainJob, run_folder: str) -> str:
    """Saves the engines through Ray Train; every worker calls it. Returns where, once it is stored."""
    import ray.train
    import torch.distributed as dist

    name = agree(f"{job.model_group}-v{job.version}-{uuid.uuid4().hex[:8]}")
    stays, is_writer = not is_uri(run_folder), dist.get_rank() == 0
    mode = ray.train.CheckpointUploadMode
    place: Any = tempfile.TemporaryDirectory(prefix="troupe-checkpoint-")
    with nullcontext(str(Path(run_folder, name))) if stays else place as folder:
        if is_writer:
            Path(folder).mkdir(parents=True, exist_ok=True)
        stored = {"version": job.version, **asdict(state)}
        models.policy.save(folder, tag="policy", state=stored)
        if models.critic is not None:
            models.critic.save(folder, tag="critic", state=stored)
        ray.train.report(
            {"version": job.version},
            checkpoint=ray.train.Checkpoint.from_directory(folder) if is_writer else None,
            checkpoint_dir_name=name,
            checkpoint_upload_mode=mode.NO_UPLOAD if stays else mode.SYNC,
        )
    if dist.get_world_size() > 1:
        dist.barrier()
    return f"{run_folder}/{name}"


def resume(uri: str, models: Models, *, state: CarriedState, loss: LossConfig) -> tuple[CarriedState, list[str]]:
    """Loads the checkpoint at `uri`; every worker calls it.

    Args:
        uri: folder or URI; empty: there is nothing to resume.
        state: where there is no checkpoint.

    Returns:
        The state, and what starts afresh because it is gone (retention) or of another model: `optimizer`, `critic`.
    """
    import ray.train

    if not uri:
        return state, []
    lost = ["optimizer", *(["critic"] if models.critic is not None else [])]
    checkpoint = ray.train.Checkpoint(uri)
    files: Any = checkpoint.filesystem
    if not files.get_file_info(f"{checkpoint.path}/policy.json").is_file:
        return state, lost
    with checkpoint.as_directory() as folder:
        if models.policy.fits(folder, tag="policy"):
            state = state.resumed(models.policy.load(folder, tag="policy"), loss)
            lost.remove("optimizer")
        if models.critic is not None and models.critic.fits(folder, tag="critic"):
            num_critic_jobs = int(models.critic.load(folder, tag="critic")["num_critic_jobs"])
            state = replace(state, num_critic_jobs=num_critic_jobs)
            lost.remove("critic")
    return state, lost


def sweep(run_folder: str, job: TrainJob) -> None:
    """Empties what killed tries left of a version that was never committed, where the run lies on a disk.

    The folders stay: Ray Train may know them, and fails when it wants to delete one that is gone.
    """
    import torch.distributed as dist

    if dist.get_rank() == 0 and not is_uri(run_folder):
        for leftover in Path(run_folder).glob(f"{job.model_group}-v{job.version}-*/*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def agree(value: Any) -> Any:
    """Worker 0's value, on every worker."""
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
