"""trainer_supervisor: keeps one warm Ray Train run per model group alive and passes jobs to its workers.

    TrainerHandle ──submit──> TrainerSupervisor (detached actor) <──long poll── workers (trainer.run_worker)
                  <──result──     └─ thread: Ray Train fit(), again and again

The supervisor outlives drivers, jobs and iterations. When it dies Ray restarts it, and the workers start again under the
same run name. Its memory is lost then, and handles send their job again.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stores.inside_ray import free_reservations_of_the_dead
from stores.journal.stage_results import TrainAnswer
from train_loops.train_job import TrainFailure, TrainJob
from train_loops.worker.trainer import ANSWER_TIMEOUT_S, NAMESPACE, run_worker

if TYPE_CHECKING:
    from ray.train.torch import TorchConfig

MAX_TRIES = 2
"""So often a job is tried whose training raises something that is not the job's fault."""
MAX_DEATHS = 6
"""After so many deaths of workers (killed, machine lost) a job is given up."""
MAX_FAILED_STARTS = 3
"""After so many starts in a row that failed, open jobs are answered with the error."""
MAX_RESULTS = 64
"""So many results are kept; the oldest is forgotten first."""

ENVIRONMENT = {
    # Ray Train forwards these from the supervisor's process: without the first each job takes up to 2 s longer.
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
    # glibc gives freed activations back to the system and gets them again page by page: 5 to 25% of a pass. They are
    # given back when the job is done, if memory is scarce (trainer.py).
    "MALLOC_MMAP_THRESHOLD_": str(2**35),
    "MALLOC_TRIM_THRESHOLD_": str(2**35),
    # A thread's own arena holds 64 MiB; beyond that malloc maps and unmaps all the same, in every backward pass.
    "MALLOC_ARENA_MAX": "1",
}


class TrainerSupervisor:
    """The detached actor of one trainer.

    `epoch` names one start of the Ray Train run. Workers of an earlier start may still be alive when the next has begun;
    their calls are refused, so that two groups never answer the same job.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        os.environ.update({k: os.environ.get(k, v) for k, v in ENVIRONMENT.items()})
        self._name, self._settings = name, settings
        self._epoch = ""
        self._jobs: dict[str, TrainJob] = {}
        """Open attempts, oldest first."""
        self._results: dict[str, TrainAnswer | TrainFailure] = {}
        """By attempt, oldest first."""
        self._tries: dict[str, int] = {}
        """By attempt, how often its training raised."""
        self._deaths: dict[str, int] = {}
        """By attempt, how often a worker died at it."""
        self._pids: dict[int, int] = {}
        """Process ids by rank, of the workers of this epoch that have said hello."""
        self._handed_out = ""
        """The attempt that the workers are at; empty while they wait."""
        self._num_failed_starts, self._error = 0, ""
        self._condition = asyncio.Condition()
        """Notified at every change; methods of the actor wait on it for what they need (`_wait`)."""
        threading.Thread(target=self._run_for_ever, daemon=True).start()

    # Called by handles.

    async def submit(self, attempt: str, job: TrainJob) -> None:
        """Queues an attempt; one that is known already is left as it is."""
        if attempt not in self._results:
            self._jobs.setdefault(attempt, job)
        self._give_up_if_unable()
        await self._wake()

    async def result(self, attempt: str, wait_s: float) -> TrainAnswer | TrainFailure | None:
        """Returns what became of an attempt; None if that is not known after `wait_s`."""
        await self._wait(lambda: attempt in self._results, wait_s)
        return self._results.get(attempt)

    async def ready(self, wait_s: float) -> dict[str, Any]:
        """Returns the status once all workers wait for jobs or the start has failed for good, or after `wait_s`."""
        await self._wait(lambda: self._is_ready() or self._num_failed_starts >= MAX_FAILED_STARTS, wait_s)
        return await self.status()

    async def status(self) -> dict[str, Any]:
        """Returns what the trainer is doing, for messages and tests."""
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
        """Takes note that a worker is up and will ask for jobs."""
        self._check(epoch)
        self._pids[rank] = pid
        if self._is_ready():
            self._num_failed_starts = 0
        await self._wake()

    async def next_job(self, epoch: str, last: str, wait_s: float) -> tuple[str, TrainJob] | None:
        """Returns the oldest open attempt other than `last`, with its job; None if there is none after `wait_s`.

        Every worker asks for itself. Rank 0 may not yet have reported `last`, so the oldest attempt can still be that one:
        the others must not be given it again.
        """
        self._check(epoch)
        await self._wait(lambda: self._oldest() not in ("", last), wait_s)
        self._check(epoch)  # the next start may have begun meanwhile, and its workers do the job
        oldest = self._oldest()
        if oldest in ("", last):
            return None
        self._handed_out = oldest
        return oldest, self._jobs[oldest]

    async def finished(self, epoch: str, attempt: str, answer: TrainAnswer) -> None:
        """Takes the answer to an attempt: its version is committed, or there was nothing to train."""
        self._check(epoch)
        await self._close(attempt, answer)

    async def failed(self, epoch: str, attempt: str, failure: TrainFailure) -> None:
        """Takes note that an attempt failed by its own fault: it is not tried again."""
        self._check(epoch)
        await self._close(attempt, failure)

    # Called by the controller.

    async def group_failed(self, epoch: str, failure: TrainFailure, is_death: bool) -> None:
        """Takes note that the workers ended; the attempt they were at is tried again by the next ones, if it may.

        Args:
            failure: what the worker raised.
            is_death: the worker was killed or lost. More of these are allowed, because they are rarely the job's fault.
        """
        self._check(epoch)
        if not self._is_ready():
            self._num_failed_starts += not is_death
            self._error = f"{failure.kind}: {failure.message}"
        self._pids.clear()
        attempt, self._handed_out = self._handed_out, ""
        if attempt in self._jobs:
            counts, limit = (self._deaths, MAX_DEATHS) if is_death else (self._tries, MAX_TRIES)
            counts[attempt] = counts.get(attempt, 0) + 1
            if counts[attempt] >= limit:
                await self._close(attempt, failure)
        self._give_up_if_unable()
        await self._wake()

    def _check(self, epoch: str) -> None:
        if epoch != self._epoch:
            raise RuntimeError(f"trainer {self._name}: a worker of an earlier start is still there; it must end")

    def _is_ready(self) -> bool:
        return len(self._pids) == self._settings["train"]["num_workers"]

    def _oldest(self) -> str:
        return next(iter(self._jobs), "")

    async def _close(self, attempt: str, result: TrainAnswer | TrainFailure) -> None:
        self._jobs.pop(attempt, None)
        self._results.setdefault(attempt, result)
        self._handed_out = ""
        while len(self._results) > MAX_RESULTS:
            self._results.pop(next(iter(self._results)))
        await self._wake()

    def _give_up_if_unable(self) -> None:
        if self._num_failed_starts < MAX_FAILED_STARTS:
            return
        for attempt in list(self._jobs):
            self._jobs.pop(attempt)
            self._results[attempt] = TrainFailure(kind="TrainerStartError", message=self._error)

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
        """Runs Ray Train's `fit` in a thread; it ends only when the controller dies or cannot start, and is started again."""
        wait_s = 1.0
        while True:
            self._epoch, self._pids = uuid.uuid4().hex, {}
            try:
                free_reservations_of_the_dead()
                _fit(self._name, self._epoch, self._settings)
            except Exception as error:  # noqa: BLE001  # whatever ended the run: it is started again, and jobs are kept
                self._error = f"{type(error).__name__}: {error}"
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, 30.0)


def _fit(name: str, epoch: str, settings: dict[str, Any]) -> None:
    """Runs the workers of one epoch; returns or raises when they cannot go on."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    class Failures(UserCallback):
        """Runs in Ray Train's controller and reports to the supervisor why workers ended."""

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            import ray

            is_death = {rank: _is_death(error) for rank, error in worker_exceptions.items()}
            # When one worker is killed the others fail in their collectives: the death is the cause, not their errors.
            rank = min(worker_exceptions, key=lambda r: (not is_death[r], r))
            error = getattr(worker_exceptions[rank], "_base_exc", worker_exceptions[rank])
            failure = TrainFailure(kind=type(error).__name__, message=str(error))
            supervisor = ray.get_actor(name, namespace=NAMESPACE)
            ray.get(supervisor.group_failed.remote(epoch, failure, is_death[rank]), timeout=ANSWER_TIMEOUT_S)

    train = settings["train"]
    resources = {"CPU": train["cpus_per_worker"]} | ({"GPU": train["gpus_per_worker"]} if _uses_gpu(train) else {})
    # This is what TorchTrainer does, except that supervisor and controller of a single CPU worker need not import torch:
    # 2 s and 180 MB each. `engine.join_workers` makes the group of one.
    DataParallelTrainer(
        run_worker,
        backend_config=_backend(train),
        train_loop_config={
            "supervisor": name,
            "epoch": epoch,
            "train": train,
            "run_folder": f"{settings['storage_path'].rstrip('/')}/{settings['run_name']}",
        },
        scaling_config=ScalingConfig(
            num_workers=train["num_workers"], use_gpu=_uses_gpu(train), resources_per_worker=resources
        ),
        # Ray Train counts tries, and would delete the checkpoint of the version that is trained from: `drop_older` knows versions.
        run_config=RunConfig(  # type: ignore[call-arg]  # the checker sees Ray Train V1
            name=settings["run_name"],
            storage_path=settings["storage_path"],
            failure_config=FailureConfig(max_failures=MAX_DEATHS),  # of this `fit`: the supervisor starts another
            callbacks=[Failures()],  # type: ignore[list-item]
            worker_runtime_env={"env_vars": WORKER_ENVIRONMENT},
        ),
    ).fit()


def _backend(train: dict[str, Any]) -> TorchConfig | None:
    """Returns the settings of the workers' process group; None for a single worker on a CPU, which needs none of Ray Train's."""
    if train["num_workers"] == 1 and not _uses_gpu(train):
        return None
    from ray.train.torch import TorchConfig

    # While worker 0 commits, or learns for the whole team, the others wait in a collective, as long as a job may take.
    return TorchConfig(backend="nccl" if _uses_gpu(train) else "gloo", timeout_s=math.ceil(train["job_timeout_s"]))


def _is_death(error: Exception) -> bool:
    """Says whether a worker ended without raising: killed, out of memory, machine lost, hung."""
    import ray

    return type(error).__name__.startswith("WorkerHealthCheck") or isinstance(error, ray.exceptions.RayError)


def _uses_gpu(train: dict[str, Any]) -> bool:
    return train["gpus_per_worker"] > 0
