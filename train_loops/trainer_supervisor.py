"""holder: keeps one warm Ray Train run per model group alive and passes it jobs.

    pipeline ──job──> TrainerHandle ──submit──> TrainerSupervisor (detached actor) <──long poll── workers (trainer.run_worker)
             <──result──                <──result──   └─ thread: Ray Train fit(), again and again

The holder outlives drivers, jobs and iterations; Ray restarts it when it dies, and the workers start again under the
same run name. Its memory is lost then: handles send their job again. A job is done when its version is committed,
so that sending one twice is harmless.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stores.files import is_uri, local_path
from stores.placement import ON_HEAD
from stores.waiting import waiting
from train_loops.config import TrainConfig
from train_loops.trainer import ANSWER_TIMEOUT_S, NAMESPACE, run_worker

MAX_TRIES = 2
"""Of a job whose training raises something that is not its own fault."""
MAX_DEATHS = 6
"""Of workers (killed, machine lost) before a job is given up."""
MAX_FAILED_STARTS = 3
POLL_S = 2.0
"""A handle asks so often: a thread that waits for Ray can be interrupted only between two questions."""
GLOO_TIMEOUT_S = 300

OF_PROCESSES = {"num_workers", "threads", "cpus_per_worker", "gpus_per_worker"}
"""The train settings that shape a trainer's processes."""

ENVIRONMENT = {
    # Ray Train forwards these from the holder's process: without the first each job takes up to 2 s longer.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
WORKER_ENVIRONMENT = {
    # Idle OpenMP threads sleep instead of spinning: beside a busy engine a trainer of 2 threads is 3 times faster.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    # glibc gives freed activations back to the system and gets them again page by page: 5 to 13% of a pass. They are
    # given back when the job is done (trainer.py).
    "MALLOC_MMAP_THRESHOLD_": str(2**35),
    "MALLOC_TRIM_THRESHOLD_": str(2**35),
}


class TrainJobError(RuntimeError):
    """A job failed for good; `kind` names the exception that the trainer raised."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class TrainerSupervisor:
    """The actor. Methods with `epoch` are called by the workers of one start of the run; old ones are refused."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        os.environ.update({k: os.environ.get(k, v) for k, v in ENVIRONMENT.items()})
        self._name, self._settings = name, settings
        self._epoch = ""
        self._jobs: dict[str, dict[str, Any]] = {}
        """Open attempts, oldest first."""
        self._results: dict[str, dict[str, Any]] = {}
        self._tries: dict[str, int] = {}
        self._deaths: dict[str, int] = {}
        self._pids: dict[int, int] = {}
        self._handed_out = ""
        self._num_failed_starts, self._error = 0, ""
        self._condition = asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._run_for_ever, daemon=True).start()

    # Called by handles.

    async def submit(self, job: dict[str, Any]) -> None:
        """Queues an attempt; one that is known already is left as it is."""
        if job["attempt"] not in self._results:
            self._jobs.setdefault(job["attempt"], job)
        self._give_up_if_unable()
        await self._wake()

    async def result(self, attempt: str, wait_s: float) -> dict[str, Any] | None:
        """The result of an attempt, or `{"error": ...}`; None if there is none after `wait_s`."""
        await self._wait(lambda: attempt in self._results, wait_s)
        return self._results.get(attempt)

    async def ready(self, wait_s: float) -> dict[str, Any]:
        """The status, once all workers wait for jobs or the start has failed for good, or after `wait_s`."""
        await self._wait(lambda: self._is_ready() or self._num_failed_starts >= MAX_FAILED_STARTS, wait_s)
        return await self.status()

    async def status(self) -> dict[str, Any]:
        """What the trainer is doing, for messages and tests."""
        return {
            "is_ready": self._is_ready(),
            "pids": dict(self._pids),
            "open": list(self._jobs),
            "handed_out": self._handed_out,
            "error": self._error,
            "num_failed_starts": self._num_failed_starts,
        }

    # Called by workers.

    async def hello(self, epoch: str, rank: int, pid: int) -> None:
        """A worker is up and will ask for jobs."""
        self._check(epoch)
        self._pids[rank] = pid
        if self._is_ready():
            self._num_failed_starts = 0
        await self._wake()

    async def next_order(self, epoch: str, last: str, wait_s: float) -> dict[str, Any] | None:
        """The oldest open attempt other than `last`; None if there is none after `wait_s`."""
        self._check(epoch)
        await self._wait(lambda: self._oldest() not in ("", last), wait_s)
        oldest = self._oldest()
        if oldest in ("", last):
            return None
        self._handed_out = oldest
        return self._jobs[oldest]

    async def finished(self, epoch: str, attempt: str, result: dict[str, Any]) -> None:
        """An attempt's version is committed, or there was nothing to train."""
        self._check(epoch)
        await self._close(attempt, result)

    async def failed(self, epoch: str, attempt: str, failure: dict[str, str]) -> None:
        """An attempt failed by its own fault."""
        self._check(epoch)
        await self._close(attempt, {"error": failure})

    # Called by the controller.

    async def group_failed(self, epoch: str, failure: dict[str, str], is_death: bool) -> None:
        """Workers ended. Whoever died by itself (killed, lost) is not held against the job for long."""
        self._check(epoch)
        if not self._is_ready():
            self._num_failed_starts += not is_death
            self._error = f"{failure['kind']}: {failure['message']}"
        self._pids.clear()
        attempt, self._handed_out = self._handed_out, ""
        if attempt in self._jobs:
            counts, limit = (self._deaths, MAX_DEATHS) if is_death else (self._tries, MAX_TRIES)
            counts[attempt] = counts.get(attempt, 0) + 1
            if counts[attempt] >= limit:
                await self._close(attempt, {"error": failure})
        self._give_up_if_unable()
        await self._wake()

    def _check(self, epoch: str) -> None:
        if epoch != self._epoch:
            raise RuntimeError(f"trainer {self._name}: a worker of an earlier start is still there; it must end")

    def _is_ready(self) -> bool:
        return len(self._pids) == self._settings["train"]["num_workers"]

    def _oldest(self) -> str:
        return next(iter(self._jobs), "")

    async def _close(self, attempt: str, result: dict[str, Any]) -> None:
        self._jobs.pop(attempt, None)
        self._results.setdefault(attempt, result)
        self._handed_out = ""
        while len(self._results) > 64:
            self._results.pop(next(iter(self._results)))
        await self._wake()

    def _give_up_if_unable(self) -> None:
        if self._num_failed_starts < MAX_FAILED_STARTS:
            return
        for attempt in list(self._jobs):
            self._jobs.pop(attempt)
            self._results[attempt] = {"error": {"kind": "TrainerStartError", "message": self._error}}

    async def _wake(self) -> None:
        async with self._condition:
            self._condition.notify_all()

    async def _wait(self, test: Callable[[], bool], wait_s: float) -> None:
        async with self._condition:
            try:
                await asyncio.wait_for(self._condition.wait_for(test), wait_s)
            except TimeoutError:
                return

    def _run_for_ever(self) -> None:
        """`fit` ends only when the controller dies or cannot start: then it is started again."""
        wait_s = 1.0
        while True:
            self._epoch, self._pids = uuid.uuid4().hex, {}
            try:
                _free_reservations_of_the_dead()
                _fit(self._name, self._epoch, self._settings)
            except Exception as error:  # noqa: BLE001  # whatever ended the run: it is started again, jobs are kept
                self._error = f"{type(error).__name__}: {error}"
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, 30.0)


def _fit(name: str, epoch: str, settings: dict[str, Any]) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class Failures(UserCallback):
        """Runs in the controller: tells the holder why workers ended."""

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            import ray

            is_death = {rank: _is_death(error) for rank, error in worker_exceptions.items()}
            # A worker that fails because another was killed is not to blame.
            rank = min(worker_exceptions, key=lambda r: (not is_death[r], r))
            error = getattr(worker_exceptions[rank], "_base_exc", worker_exceptions[rank])
            failure = {"kind": type(error).__name__, "message": str(error)}
            holder = ray.get_actor(name, namespace=NAMESPACE)
            ray.get(holder.group_failed.remote(epoch, failure, is_death[rank]), timeout=ANSWER_TIMEOUT_S)

    train = settings["train"]
    resources = {"CPU": train["cpus_per_worker"]} | ({"GPU": train["gpus_per_worker"]} if _uses_gpu(train) else {})
    backend = None
    if train["num_workers"] > 1 or _uses_gpu(train):
        from ray.train.torch import TorchConfig

        backend = TorchConfig(backend="nccl" if _uses_gpu(train) else "gloo", timeout_s=GLOO_TIMEOUT_S)
    # What TorchTrainer is, except that holder and controller of a single CPU worker need not import torch: 2 s and 180 MB
    # each. `engine.join_workers` makes the group of one.
    DataParallelTrainer(
        run_worker,
        backend_config=backend,
        train_loop_config={
            "holder": name,
            "epoch": epoch,
            "train": train,
            "run_folder": f"{settings['storage_path'].rstrip('/')}/{settings['run_name']}",
        },
        scaling_config=ScalingConfig(
            num_workers=train["num_workers"], use_gpu=_uses_gpu(train), resources_per_worker=resources
        ),
        run_config=RunConfig(  # type: ignore[call-arg]  # the checker sees Ray Train V1
            name=settings["run_name"],
            storage_path=settings["storage_path"],
            failure_config=FailureConfig(max_failures=MAX_DEATHS),  # of this `fit`: the holder starts another
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=[Failures()],  # type: ignore[list-item]
            worker_runtime_env={"env_vars": WORKER_ENVIRONMENT},
        ),
    ).fit()


def _free_reservations_of_the_dead() -> None:
    """Removes placement groups of Ray Train controllers that are dead: nobody can use them again.

    Ray Train removes them itself once all workers of a group are up, and keeps those of a controller that was killed
    earlier for as long as the driver lives: the next start then waits for CPUs that no process has. Ray shows who made
    a group in its own tables only.
    """
    import ray
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]  # made at run time
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for row in state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(row)
        if not group.creator_actor_dead or group.state == PlacementGroupTableData.REMOVED:
            continue
        creator = state.actor_table(group.creator_actor_id.hex())
        if creator.get("ActorClassName") == "TrainController":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))


def _is_death(error: Exception) -> bool:
    """Whether a worker ended without raising: killed, out of memory, machine lost, hung."""
    import ray

    return type(error).__name__.startswith("WorkerHealthCheck") or isinstance(error, ray.exceptions.RayError)


def _uses_gpu(train: dict[str, Any]) -> bool:
    return train["gpus_per_worker"] > 0


class TrainerHandle:
    """A driver's end of one trainer. Cheap; any number of them may exist for one trainer."""

    def __init__(self, name: str, settings: dict[str, Any], *, keep_warm: bool) -> None:
        """Use `attach`."""
        self._name, self._settings, self._keep_warm = name, settings, keep_warm
        self._actor = self._create()

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when all workers wait for jobs. RuntimeError if they cannot start, TimeoutError if too slow."""
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

    def run_job(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Has one job trained and returns its result; sends it again after failures of processes or machines.

        Args:
            job: see `trainer.parse_job`. Sending a job whose version is committed returns the stored result.
            timeout_s: for all tries together.

        Returns:
            `{"model": ModelVersionRef dict | None, "reason": str, "metrics": {name: float}, "agents": {agent: {name:
            float}}}`; the model is None, with a reason, where there was nothing to train.

        Raises:
            TrainJobError: the job failed for good (kind `MismatchError`, `ValueError`, ...).
            TimeoutError: no result in time; says what the trainer was doing.
        """
        import ray

        attempt = f"{job['job_id']}/{uuid.uuid4().hex[:8]}"
        deadline = time.monotonic() + timeout_s
        result = None
        is_submitted = False
        while result is None and (left := deadline - time.monotonic()) > 0:
            try:
                if not is_submitted:
                    with waiting(f"trainer {self._name} to take its job"):
                        ray.get(self._actor.submit.remote(job | {"attempt": attempt}), timeout=left)
                    is_submitted = True
                with waiting(f"trainer {self._name} to do job {job['job_id']}"):
                    result = ray.get(self._actor.result.remote(attempt, min(left, POLL_S)), timeout=left + 1)
            except ray.exceptions.GetTimeoutError:
                break
            except ray.exceptions.RayActorError:
                self._attach_again()
                is_submitted = False
        if result is None:
            raise TimeoutError(
                f"job {job['job_id']} had no result after {timeout_s:.0f} s, trainer {self._name}: "
                f"{self._describe()}; raise train.job_timeout_s"
            )
        if not self._keep_warm:
            self.stop()
        if "error" in result:
            raise TrainJobError(**result["error"])
        return result

    def status(self) -> dict[str, Any]:
        """See `TrainerSupervisor.status`."""
        import ray

        return ray.get(self._actor.status.remote(), timeout=30)

    def stop(self) -> None:
        """Ends holder, controller and workers, and frees their memory. Checkpoints and weights stay."""
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
                # Ray Train's controllers start watchers that ask the cluster last started on the machine, unless told
                # which, and never end once their own is gone (200 MB each).
                runtime_env={"env_vars": {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}},
            )
            .remote(self._name, self._settings)
        )

    def _attach_again(self) -> None:
        """After a failure: the same actor if Ray restarts it, a new one if it was stopped."""
        time.sleep(1.0)
        self._actor = self._create()

    def _describe(self) -> str:
        import ray

        try:
            return str(ray.get(self._actor.status.remote(), timeout=2))
        except (ray.exceptions.RayError, TimeoutError) as error:
            return f"its holder does not answer ({type(error).__name__})"


def attach(*, name: str, run_name: str, storage_path: str | Path, train: TrainConfig) -> TrainerHandle:
    """The warm trainer `name`, started if there is none; returns at once, use `TrainerHandle.wait_ready`.

    One whose processes would be others (`OF_PROCESSES`, or another place) is ended first. Every other setting travels with
    each job, and the trainer stays. Ray must be initialised.

    Args:
        name: of the trainer, unique per run and model group.
        run_name: of the Ray Train run; checkpoints lie in `storage_path/run_name`.
        storage_path: a folder or URI that all machines see.
        train: says what processes it has.
    """
    import ray

    place = str(storage_path)
    storage = place if is_uri(place) else str(local_path(place))
    processes = train.model_dump(mode="json", include=OF_PROCESSES)
    settings = {"run_name": run_name, "storage_path": storage, "train": processes}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    actor_name = f"trainer:{name}:{digest}"
    for other in ray.util.list_named_actors(all_namespaces=True):
        is_same_trainer = other["namespace"] == NAMESPACE and other["name"].startswith(f"trainer:{name}:")
        if is_same_trainer and other["name"] != actor_name:
            ray.kill(ray.get_actor(other["name"], namespace=NAMESPACE), no_restart=True)
    return TrainerHandle(actor_name, settings, keep_warm=train.keep_warm)
