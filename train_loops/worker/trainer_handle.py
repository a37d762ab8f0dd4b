"""trainer_handle: a driver's end of one warm trainer: starts its supervisor, sends it jobs and waits for their results.

    pipeline ──run_job──> TrainerHandle ──submit, result──> TrainerSupervisor (detached actor)

Handles keep no state of their own. Ray restarts a supervisor that died, without its memory: then the handle sends its job
again. That is harmless, because a job is done when its version is committed (see trainer.py).
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from pathlib import Path
from typing import Any

from stores.files import is_uri, local_path
from stores.journal.stage_results import TrainAnswer
from stores.journal.waiting import waiting
from stores.resources import ON_HEAD
from train_loops.config import TrainConfig
from train_loops.train_job import TrainFailure, TrainJob
from train_loops.worker.trainer import NAMESPACE
from train_loops.worker.trainer_supervisor import MAX_FAILED_STARTS, TrainerSupervisor

POLL_S = 2.0
"""A handle asks this often: a thread that waits for Ray can be interrupted only between two questions."""

PROCESS_SETTINGS = {"num_workers", "threads", "cpus_per_worker", "gpus_per_worker", "job_timeout_s"}
"""The train settings that shape a trainer's processes."""


class TrainJobError(RuntimeError):
    """A job failed for good; `kind` names the exception that the trainer raised."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class TrainerHandle:
    """A driver's end of one trainer. It is cheap, and any number of handles may exist for one trainer."""

    def __init__(self, name: str, settings: dict[str, Any], *, keep_warm: bool) -> None:
        """Finds or creates the supervisor. `attach` is the public way to get a handle."""
        self._name, self._settings, self._keep_warm = name, settings, keep_warm
        self._actor = self._create()

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when all workers wait for jobs.

        Raises RuntimeError if they cannot start, and TimeoutError if they have not started in time.
        """
        import ray

        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                with waiting(f"trainer {self._name} to start"):
                    status = ray.get(self._actor.ready.remote(min(left, 5.0)), timeout=left + 1)
            except ray.exceptions.GetTimeoutError:
                break
            except ray.exceptions.RayActorError:
                self._attach_again()
                continue
            if status["is_ready"]:
                return
            if status["num_failed_starts"] >= MAX_FAILED_STARTS:
                raise RuntimeError(f"trainer {self._name} cannot start: {status['error']}")
        raise TimeoutError(
            f"trainer {self._name} was not ready after {timeout_s:.0f} s: {self._describe()}; raise "
            "train.start_timeout_s, or look whether Ray has the CPUs and GPUs that train asks for"
        )

    def run_job(self, job: TrainJob, timeout_s: float) -> TrainAnswer:
        """Sends one job and returns the answer; sends it again after failures of processes or machines.

        Args:
            job: where its version is committed already, the stored answer is returned.
            timeout_s: for all tries together.

        Raises:
            TrainJobError: the job failed for good (kind `MismatchError`, `ValueError`, ...).
            TimeoutError: no result in time; says what the trainer was doing.
        """
        import ray

        # The supervisor keeps results by attempt: a job that is sent once more later must be done again, not be answered
        # with the failure of the first time.
        attempt = f"{job.job_id}/{uuid.uuid4().hex[:8]}"
        deadline = time.monotonic() + timeout_s
        result: TrainAnswer | TrainFailure | None = None
        is_submitted = False
        while result is None and (left := deadline - time.monotonic()) > 0:
            try:
                if not is_submitted:
                    with waiting(f"trainer {self._name} to take its job"):
                        ray.get(self._actor.submit.remote(attempt, job), timeout=left)
                    is_submitted = True
                with waiting(f"trainer {self._name} to do job {job.job_id}"):
                    result = ray.get(self._actor.result.remote(attempt, min(left, POLL_S)), timeout=left + 1)
            except ray.exceptions.GetTimeoutError:
                break
            except ray.exceptions.RayActorError:
                self._attach_again()
                is_submitted = False
        if result is None:
            raise TimeoutError(
                f"job {job.job_id} had no result after {timeout_s:.0f} s, trainer {self._name}: "
                f"{self._describe()}; raise train.job_timeout_s"
            )
        if not self._keep_warm:
            self.stop()
        if isinstance(result, TrainFailure):
            raise TrainJobError(result.kind, result.message)
        return result

    def status(self) -> dict[str, Any]:
        """Returns what `TrainerSupervisor.status` says."""
        import ray

        return ray.get(self._actor.status.remote(), timeout=30)

    def stop(self) -> None:
        """Ends supervisor, controller and workers, and frees their memory. Checkpoints and weights stay."""
        import ray

        ray.kill(self._actor, no_restart=True)

    def _create(self) -> Any:
        import ray

        return (
            ray.remote(TrainerSupervisor)
            .options(
                name=self._name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                resources=ON_HEAD,
                max_restarts=-1,
                max_concurrency=100,
                # Ray Train's controllers start watchers. Without an address they ask the cluster that was started last on
                # the machine, and never end once their own is gone (200 MB each).
                runtime_env={"env_vars": {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}},
            )
            .remote(self._name, self._settings)
        )

    def _attach_again(self) -> None:
        """Finds the actor again after a failure: the same one if Ray restarts it, a new one if it was stopped."""
        time.sleep(1.0)
        self._actor = self._create()

    def _describe(self) -> str:
        import ray

        try:
            return str(ray.get(self._actor.status.remote(), timeout=2))
        except (ray.exceptions.RayError, TimeoutError) as error:
            return f"its supervisor does not answer ({type(error).__name__})"


def attach(
    *, name: str, run_name: str, storage_path: str | Path, train: TrainConfig, threads: int = 1
) -> TrainerHandle:
    """Returns a handle of the warm trainer `name`, which is started if there is none.

    It returns at once; use `TrainerHandle.wait_ready`. A trainer of this name with other `PROCESS_SETTINGS` or another
    storage path is ended first. Every other setting travels with each job, so the trainer stays. Ray must be initialised.

    Args:
        name: of the trainer, unique per run and model group.
        run_name: of the Ray Train run; checkpoints lie in `storage_path/run_name`.
        storage_path: a folder or URI that all machines see.
        train: gives the settings of its processes.
        threads: of each worker where `train.threads` is `auto`; a running trainer keeps those that it has.
    """
    import ray

    storage = str(storage_path)
    storage = storage if is_uri(storage) else str(local_path(storage))
    processes = train.model_dump(mode="json", include=PROCESS_SETTINGS)
    settings = {"run_name": run_name, "storage_path": storage, "train": processes}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    actor_name = f"trainer:{name}:{digest}"
    processes["threads"] = threads if train.threads == "auto" else train.threads
    for other in ray.util.list_named_actors(all_namespaces=True):
        is_same_trainer = other["namespace"] == NAMESPACE and other["name"].startswith(f"trainer:{name}:")
        if is_same_trainer and other["name"] != actor_name:
            ray.kill(ray.get_actor(other["name"], namespace=NAMESPACE), no_restart=True)
    return TrainerHandle(actor_name, settings, keep_warm=train.keep_warm)
