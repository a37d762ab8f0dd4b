"""run_checkpoints: the state of a model group's training beside the weights, stored with each version through Ray Train.

    engines, `CarriedState` --store_state--> <run folder>/<model group>-v<version>-<random> --resume--> engines of any layout

Worker 0 writes the files (checkpoints.py); on a disk they are written where they stay: a copy of the optimizer's state
would take as long as writing it.
"""

from __future__ import annotations

import glob
import re
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stores.files import is_uri, list_files, open_filesystem, read_file, remove_folder
from stores.weights.manifest import refuse_not_finite
from train_loops.config import LossConfig
from train_loops.train_job import TrainJob

if TYPE_CHECKING:
    from train_loops.engine.models import Models


EXPORTED = "model."
"""How the names of a policy's parameters begin that its model version holds; a value head on it is not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedState:
    """The state that a model group's training carries from job to job beside weights and moments."""

    kl_coef: float
    """The KL coefficient in the reward; adapted where `loss.adaptive_kl` is set."""
    num_critic_jobs: int = 0
    """How many jobs the critic has learned in: the policy waits for the first `critic.warmup_iterations`."""

    def resumed(self, stored: Mapping[str, Any], loss: LossConfig) -> CarriedState:
        """Returns the state of a checkpoint; a KL coefficient that is not adapted is taken from the settings."""
        kl_coef = stored["kl_coef"] if loss.adaptive_kl is not None else self.kl_coef
        return CarriedState(kl_coef=kl_coef, num_critic_jobs=stored["num_critic_jobs"])


def store_state(models: Models, state: CarriedState, *, job: TrainJob, run_folder: str, has_own_weights: bool) -> str:
    """Saves the engines through Ray Train; every worker calls it. Returns the checkpoint's URI once it is stored.

    Args: has_own_weights: the policy's weights are stored, too; without them a checkpoint takes a third less, and whoever
        resumes has loaded the version's, which must be the same numbers.

    Raises ValueError, with nothing handed to Ray Train, where a weight of the critic or a moment of an optimizer is not finite.
    """
    import ray.train
    import torch.distributed as dist

    name = agree(f"{job.model_group}-v{job.version}-{uuid.uuid4().hex[:8]}")
    stays, is_writer = not is_uri(run_folder), dist.get_rank() == 0
    mode = ray.train.CheckpointUploadMode
    scratch: Any = tempfile.TemporaryDirectory(prefix="troupe-checkpoint-")
    with nullcontext(str(Path(run_folder, name))) if stays else scratch as folder:
        if is_writer:
            Path(folder).mkdir(parents=True, exist_ok=True)
        stored = {"version": job.version, **asdict(state)}
        models.policy.save(folder, tag="policy", state=stored, but="" if has_own_weights else EXPORTED)
        if models.critic is not None:
            models.critic.save(folder, tag="critic", state=stored)
        if is_writer:
            for file in sorted(Path(folder).glob("*.safetensors")):
                refuse_not_finite(file, of=f"version {job.version} of {job.model_group}")
        ray.train.report(
            {"version": job.version},
            checkpoint=ray.train.Checkpoint.from_directory(folder) if is_writer else None,
            checkpoint_dir_name=name,
            checkpoint_upload_mode=mode.NO_UPLOAD if stays else mode.SYNC,
        )
    if dist.get_world_size() > 1:
        dist.barrier()  # nobody goes on before worker 0 has stored it
    return f"{run_folder}/{name}"


def resume(uri: str, models: Models, *, state: CarriedState, loss: LossConfig) -> tuple[CarriedState, list[str]]:
    """Loads the checkpoint at `uri`; every worker calls it.

    Args:
        uri: folder or URI; empty: there is nothing to resume.
        state: is returned where there is no checkpoint.

    Returns:
        The state, and the parts that start afresh, because they were deleted or are of another model: `optimizer`, `critic`.

    Raises ValueError where a file is damaged.
    """
    import ray.train
    from pyarrow.fs import LocalFileSystem

    if not uri:
        return state, []
    lost = ["optimizer", *(["critic"] if models.critic is not None else [])]
    # Ray would read the place as a URI, in which a name may not hold a blank or an umlaut.
    filesystem, path = open_filesystem(uri)
    checkpoint = ray.train.Checkpoint(path, filesystem=filesystem or LocalFileSystem())
    if read_file(f"{uri}/policy.json") is None:
        return state, lost
    with checkpoint.as_directory() as folder, _saying_what_to_do(uri):
        if models.policy.fits(folder, tag="policy"):
            state = state.resumed(models.policy.load(folder, tag="policy"), loss)
            lost.remove("optimizer")
        if models.critic is not None:
            state = replace(state, num_critic_jobs=0)  # the policy's file says what the critic of then had
            if models.critic.fits(folder, tag="critic"):
                num_critic_jobs = int(models.critic.load(folder, tag="critic")["num_critic_jobs"])
                state = replace(state, num_critic_jobs=num_critic_jobs)
                lost.remove("critic")
    return state, lost


@contextmanager
def _saying_what_to_do(uri: str) -> Iterator[None]:
    """Makes the error of a checkpoint that is damaged, as after a power cut, say where it lies and how training goes on."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"checkpoint {uri} cannot be resumed: {error}. Copy it again from where it was kept, or empty its folder: then training goes "
            "on with an optimizer, and a critic, that start afresh"
        ) from error


def sweep(run_folder: str, job: TrainJob) -> None:
    """Empties the folders that killed tries left of a version that was never committed, if the run lies on a disk.

    The folders themselves stay: Ray Train may know them, and fails when it wants to delete one that is gone.
    """
    import torch.distributed as dist

    if dist.get_rank() == 0 and not is_uri(run_folder):
        for leftover in Path(run_folder).glob(f"{glob.escape(job.model_group)}-v{job.version}-*/*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def drop_older(run_folder: str, model_group: str, *, needed: Collection[int | None]) -> None:
    """Empties the checkpoints of all but the last two versions and the needed ones, once a version is committed.

    Args: needed: the version that the last was trained from, since a stage that is repeated needs its checkpoint, and the champion
        that rejections go back to.
    """
    import torch.distributed as dist

    if dist.get_rank() != 0:
        return
    name_form = re.compile(rf"{re.escape(model_group)}-v(\d+)-[0-9a-f]{{8}}")
    names = {file.name.partition("/")[0] for file in list_files(run_folder)}
    versions = {name: int(found[1]) for name in names if (found := name_form.fullmatch(name))}
    kept = {*sorted(set(versions.values()))[-2:], *needed}
    for name, version in versions.items():
        if version not in kept:
            # The folder stays: Ray Train may know it, and fails where it is gone.
            remove_folder(f"{run_folder}/{name}", keeps_folder=True)


def agree(value: Any) -> Any:
    """Returns worker 0's value on every worker; all of them call it."""
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
