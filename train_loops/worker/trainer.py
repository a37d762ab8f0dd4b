"""trainer: one job -> one committed model version. Runs on every worker of a warm Ray Train run.

    wait for a job <──────────────────────────────────────────────────┐
      version committed already? -> its stored result ───────────────────┤
      memory holds the parent?   -> go on                                │
      else                       -> the parent's checkpoint, or weights  │
      rows -> learn -> checkpoint (Ray Train) -> weights (commit) -> done┘

Reads pinned traces and rewards and the parent's weights; writes a checkpoint, then the weights with the result beside
them. A job that is killed at any point and sent again ends with the same version: if it is committed its result is
returned, else it is trained again from the parent, optimizer included.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from stores import resources
from stores.by_name import open_by_name
from stores.files import naming_file
from stores.journal.stage_results import TrainAnswer, TrainParts
from stores.logs import bound, carried
from stores.traces.shown_advantages import write_advantages
from stores.traces.store import TraceStore
from stores.types import ModelVersionRef
from stores.weights.manifest import Probe, whole_model
from stores.weights.store import WeightStore
from train_loops.config import TrainConfig
from train_loops.engine.run_checkpoints import CarriedState, agree, drop_older, resume, store_state, sweep
from train_loops.engine.state_sizes import has_own_weights
from train_loops.estimators import TEAM_LEARNER
from train_loops.signal.team_signal import LOG_RATIOS_FILE, read_team_signal
from train_loops.train_job import TrainFailure, TrainJob, train_parts

if TYPE_CHECKING:
    from train_loops.engine.models import Models
    from train_loops.worker.learner import Learned

logger = logging.getLogger(__name__)

NAMESPACE = "troupe"
RESULT_FILE = "train_result.json"
"""Lies beside the weights and holds the result of the job that made them."""
POLL_S = 20.0
"""A worker asks for the next job with long polls of this length."""
ANSWER_TIMEOUT_S = 120.0
"""A supervisor that answers later hangs: the worker that asked fails, and Ray Train starts the group again."""
MIN_AVAILABLE_SHARE = 0.5
"""With less of the machine's or container's memory available, a trainer gives back what it does not use."""


def run_worker(settings: dict[str, Any]) -> None:
    """Runs on every worker of Ray Train: waits for jobs of the supervisor until the group is torn down.

    Each worker waits by a long poll of its own, because a collective would time out. A ValueError is the job's fault and is
    answered; everything else restarts the group.
    """
    import ray
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    num_workers = ray.train.get_context().get_world_size()
    supervisor = ray.get_actor(settings["supervisor"], namespace=NAMESPACE)
    epoch = settings["epoch"]
    worker = Worker(threads=settings["train"]["threads"], run_folder=settings["run_folder"])
    ray.get(supervisor.hello.remote(epoch, rank, os.getpid()), timeout=ANSWER_TIMEOUT_S)
    last = ""
    while True:
        handed_out = ray.get(supervisor.next_job.remote(epoch, last, POLL_S), timeout=POLL_S + ANSWER_TIMEOUT_S)
        if handed_out is None:
            continue
        last, job = handed_out
        try:
            with carried(job.log), bound(worker=rank):
                try:
                    answer = worker.execute_team(job) if job.is_team else worker.execute(job)
                finally:
                    if job.leaves_gpu:
                        worker.leave_gpu()
        except ValueError as error:
            failure = TrainFailure(kind=type(error).__name__, message=str(error))
            ray.get(supervisor.failed.remote(epoch, last, failure), timeout=ANSWER_TIMEOUT_S)
            if num_workers > 1:  # the others may wait for this one in a collective: only a restart frees them
                raise
        else:
            if rank == 0:
                ray.get(supervisor.finished.remote(epoch, last, answer), timeout=ANSWER_TIMEOUT_S)
        release_if_scarce()


class Worker:
    """The engines of one model group, kept between jobs."""

    def __init__(self, *, threads: int, run_folder: str) -> None:
        """Args: threads: of torch; run_folder: where Ray Train stores this run's checkpoints, a folder or URI."""
        import torch

        from train_loops.engine.deepspeed_engine import join_workers
        from train_loops.worker import learner  # noqa: F401  # imports everything heavy now, not in the first job

        torch.set_num_threads(threads)
        join_workers()
        self._run_folder = run_folder
        self._train = TrainConfig()
        """The settings of the last job; for other settings the engines are built anew."""
        self._models: Models | None = None
        self._held: ModelVersionRef | None = None
        """The committed version whose weights the engines in memory have; None while a job changes them."""
        self._is_offloaded = False
        """Whether the engines wait in the host's memory: their GPU is an engine's that serves (`pool: shared`)."""
        self._state = CarriedState(kl_coef=0.0)
        self._lost: list[str] = []
        """The parts of the parent's state that could not be resumed; the next version's note names them."""

    def execute_team(self, job: TrainJob) -> TrainAnswer:
        """Does a job of the whole team's learner on worker 0 and gives every worker its answer."""
        import torch.distributed as dist

        return agree(open_by_name(TEAM_LEARNER, place="")(job) if dist.get_rank() == 0 else None)

    def execute(self, job: TrainJob) -> TrainAnswer:
        """Trains one job to a committed version."""
        store = WeightStore(job.weights_uri)
        stored = agree(_stored_answer(store, job))
        if stored is not None:
            logger.info("version %d is committed already", job.version)
            return stored
        began, started = time.time(), time.perf_counter()
        parent = job.parent
        assert parent is not None, "TrainJob: a model group's job has a parent"
        parent_folder = store.fetch(parent)
        self._hold(job, parent, store)
        loaded = time.perf_counter()
        # A fresh critic's advantages are noise: for the first jobs only the critic learns.
        trains_policy = not self._has_values or self._state.num_critic_jobs >= job.train.critic.warmup_iterations
        ends = {"load": time.time()}
        learned = self._learn(job, store, trains_policy=trains_policy)
        ends |= {"read": ends["load"] + learned.metrics["train/read_s"], "learn": time.time()}
        learned.metrics["train/load_s"] = loaded - started
        learned.metrics["train/is_state_lost"] = float(bool(self._lost))
        if learned.reason:
            logger.info("keeps version %d: %s", parent.version, learned.reason)
            return _answer(None, learned, parts=train_parts(began, ends))
        note = _note(job, learned, lost=self._lost)
        self._held = self._store(job, store, parent_folder, learned=learned, note=note)
        self._lost = []
        logger.info(
            "committed version %d after %d rows in %.1f s",
            job.version,
            int(learned.metrics["train/rows"]),
            time.perf_counter() - started,
        )
        return _answer(self._held, learned, parts=train_parts(began, ends | {"store": time.time()}))

    def leave_gpu(self) -> None:
        """Frees the GPU after a job, whatever became of it.

        The engines wait in the host's memory. Those that cannot, and those that a job left half-way, are given up: the
        next job loads the parent's checkpoint.
        """
        import torch

        if self._models is not None and (self._held is None or not self._models.offload()):
            self._models.close()
            self._models = self._held = None
        self._is_offloaded = self._models is not None
        gc.collect()  # engines are in reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            logger.info("leaves the GPU with %.1f GiB still reserved", torch.cuda.memory_reserved() / 2**30)

    def _return_to_gpu(self) -> None:
        if self._is_offloaded and self._models is not None:
            self._models.reload()
        self._is_offloaded = False

    @property
    def _has_values(self) -> bool:
        return self._models is not None and self._models.has_values

    def _learn(self, job: TrainJob, store: WeightStore, *, trains_policy: bool) -> Learned:
        """Trains the engines on the job's rows; unless nothing was trained they then have weights that no version has."""
        from train_loops.rows.masks import with_masks
        from train_loops.worker.learner import learn, read_rows

        assert self._models is not None
        assert job.parent is not None
        started = time.perf_counter()
        samples, funnel = read_rows(
            TraceStore(job.traces_uri),
            job.traces,
            job.rewards,
            model_group=job.model_group,
            config=job.train,
            credit_kind=job.credit_kind,
        )
        samples = with_masks(samples, store.fetch(whole_model(job.parent)))
        read = time.perf_counter()
        # Before the first step: if it fails half-way the engines must not pass for the parent's.
        held, self._held = self._held, None
        learned = learn(
            samples,
            self._models,
            config=job.train,
            credit_kind=job.credit_kind,
            seed=job.seed,
            funnel=funnel,
            trains_policy=trains_policy,
            team=read_team_signal(store, job),
            kl_coef=self._state.kl_coef,
            # Not by `job.train`: for other settings `_hold` would build the engines anew.
            is_off_policy=job.is_off_policy,
            has_all_groups=not job.traces.excluded_groups,
        )
        learned.metrics["train/read_s"] = read - started
        if learned.reason:
            self._held = held
        return learned

    def _store(
        self, job: TrainJob, store: WeightStore, parent_folder: Path, *, learned: Learned, note: str
    ) -> ModelVersionRef:
        """Stores the state of the engines: the checkpoint first, then the version, whose manifest says that all is there."""
        assert self._models is not None and job.parent is not None
        begun = time.perf_counter()
        num_critic_jobs = self._state.num_critic_jobs + self._has_values
        self._state = CarriedState(kl_coef=learned.kl_coef, num_critic_jobs=num_critic_jobs)
        checkpoint = store_state(
            self._models,
            self._state,
            job=job,
            run_folder=self._run_folder,
            has_own_weights=has_own_weights(job.train),
        )
        learned.metrics["train/checkpoint_s"] = time.perf_counter() - begun
        ref = self._commit(job, store, parent_folder, checkpoint=checkpoint, learned=learned, note=note)
        learned.metrics["train/commit_s"] = time.perf_counter() - begun
        drop_older(self._run_folder, job.model_group, needed={job.parent.version, job.champion})
        return ref

    def _hold(self, job: TrainJob, parent: ModelVersionRef, store: WeightStore) -> None:
        """Brings the engines in memory to the weights and state of the job's parent, under the job's settings."""
        from train_loops.engine.models import build_models

        if self._held == parent and self._train == job.train and self._models is not None:
            self._return_to_gpu()
            self._models.compare_with_reference_of(store, parent, job.train)
            return
        if self._models is not None:
            self._models.close()
        self._models = self._held = None
        self._is_offloaded = False
        sweep(self._run_folder, job)
        self._train, self._state = job.train, CarriedState(kl_coef=job.train.loss.kl_in_reward_coef)
        self._models = build_models(store, parent, job.train)
        checkpoint = store.manifest(parent).checkpoint
        self._state, self._lost = resume(checkpoint, self._models, state=self._state, loss=job.train.loss)
        if self._lost:
            logger.warning(
                "version %d is trained on, but its %s started afresh: checkpoint %s is gone (only those of the last two versions, of their parent and of "
                "the champion that rejections go back to stay) or of another model",
                parent.version,
                " and ".join(self._lost),
                checkpoint,
            )
        self._held = parent

    def _commit(
        self, job: TrainJob, store: WeightStore, parent_folder: Path, *, checkpoint: str, learned: Learned, note: str
    ) -> ModelVersionRef:
        """Exports the policy and commits it as the job's version; worker 0 writes."""
        import torch.distributed as dist

        from train_loops.engine.adapters import export_adapter
        from train_loops.engine.export import export_weights
        from train_loops.engine.logprobs import probe_logprobs
        from train_loops.rows.batching import device

        assert self._models is not None
        assert job.parent is not None
        before = store.manifest(job.parent)
        sequences = before.probe.sequences
        probe = Probe(sequences=sequences, logprobs=probe_logprobs(self._models.policy, sequences, on=device()))
        ref = None
        with tempfile.TemporaryDirectory(prefix="troupe-weights-") as scratch:
            if before.base is None:
                out = export_weights(self._models.policy, parent=parent_folder, out=scratch)
            else:
                out = export_adapter(self._models.policy, scratch)
            if dist.get_rank() == 0:
                with naming_file(out):
                    (out / RESULT_FILE).write_text(_answer(None, learned).to_text())
                    write_advantages(out, learned.advantages)
                    if learned.log_ratios:
                        (out / LOG_RATIOS_FILE).write_text(json.dumps(learned.log_ratios))
                ref = store.commit(
                    out,
                    model_group=job.model_group,
                    version=job.version,
                    parent=job.parent.version,
                    run_id=job.run_id,
                    iteration=job.iteration,
                    probe=probe,
                    checkpoint=checkpoint,
                    note=note,
                    reference=self._models.compared_with,
                    base=before.base,
                )
        return agree(ref)


def _note(job: TrainJob, learned: Learned, *, lost: Sequence[str]) -> str:
    """Returns what the manifest of the job's version says about how it was made."""
    rows = f" on {int(learned.metrics['train/rows'])} rows"
    sampler = "" if job.sampled_by in (None, job.parent_version) else f" sampled by v{job.sampled_by}"
    note = f"{job.train.algorithm}{rows}{sampler}"
    if not learned.metrics["train/trained_rows"]:
        note = f"critic alone{rows}{sampler} (its warm-up, or no advantages): the policy is its parent's"
    return note + (f"; {' and '.join(lost)} started afresh" if lost else "")


def _stored_answer(store: WeightStore, job: TrainJob) -> TrainAnswer | None:
    """Returns the answer that was stored with the job's version; None if the version is not committed.

    Raises ValueError where the version exists, but another job made it.
    """
    ref = store.ref(job.model_group, job.version)
    if ref is None:
        return None
    manifest = store.manifest(ref)
    if (manifest.parent, manifest.run_id) != (job.parent_version, job.run_id):
        raise ValueError(
            f"{ref.uri} exists already, trained from version {manifest.parent} in run {manifest.run_id!r}; job "
            f"{job.job_id} asks for it trained from {job.parent_version} in {job.run_id!r}: ask for another version"
        )
    path = store.fetch(ref) / RESULT_FILE
    if not path.is_file():
        raise ValueError(f"{ref.uri} exists already and was not made by a trainer: ask for another version")
    return replace(TrainAnswer.from_text(path.read_text()), model=ref)


def _answer(ref: ModelVersionRef | None, learned: Learned, *, parts: TrainParts | None = None) -> TrainAnswer:
    return TrainAnswer(model=ref, reason=learned.reason, metrics=learned.metrics, agents=learned.agents, parts=parts)


def release_if_scarce() -> None:
    """Gives the memory that this process has freed back to the system where other processes may need it.

    The next job takes it again, at no cost where this process kept it. Where the system has it back, the kernel hands it out page
    by page: on a virtual machine that was a quarter of a training job.
    """
    if available_share() < MIN_AVAILABLE_SHARE:
        with suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def available_share() -> float:
    """Returns the share of memory that is available: of the machine, or of a container or job where that has less."""
    machine = psutil.virtual_memory()
    share = resources.available_share()
    return min(machine.available / machine.total, 1.0 if share is None else share)
