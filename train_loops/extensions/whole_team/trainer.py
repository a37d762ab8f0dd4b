"""trainer: one job of the team -> a committed version of its learner, with the signal for the model groups.

It runs on worker 0 of the first model group's trainer, before that group's own job. It reads pinned traces and rewards of
all model groups; a job that is killed and sent again ends with the same version.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from stores.journal.stage_results import TrainAnswer
from stores.traces.store import TraceStore
from stores.types import ModelVersionRef
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore, refuse_other_run
from train_loops.config import TEAM
from train_loops.signal.team_signal import write_signal
from train_loops.train_job import TrainJob, train_parts

logger = logging.getLogger(__name__)

RESULT_FILE = "train_result.json"


def train_team_learner(job: TrainJob) -> TrainAnswer:
    """Does a job whose model group is `TEAM`."""
    from train_loops.extensions.whole_team.episodes import team_episodes
    from train_loops.extensions.whole_team.learner import TeamLearner

    store = WeightStore(job.weights_uri)
    existing = store.ref(TEAM, job.version)
    if existing is not None:  # an earlier try has committed it: its result is the answer
        refuse_other_run(existing, job.run_id)
        return replace(TrainAnswer.from_text((store.fetch(existing) / RESULT_FILE).read_text()), model=existing)
    began = time.time()
    traces = TraceStore(job.traces_uri)
    episodes = team_episodes(
        list(traces.read_traces(job.traces)),
        {r.episode_id: r for r in traces.read_rewards(job.rewards)},
        credit_kind=job.credit_kind,
        train_mixed_versions=job.train.train_mixed_versions,
    )
    if not episodes:
        return TrainAnswer(model=None, reason="no episode with a rewarded turn", metrics={}, agents={})
    ends = {"read": time.time()}
    learner = TeamLearner(job.train, seed=job.seed - job.iteration)
    is_resumed = job.parent is not None and learner.load(store.fetch(job.parent))
    ends["load"] = time.time()
    signal, metrics = learner.learn(episodes, seed=job.seed)
    ends["learn"] = time.time()
    metrics["train/is_state_lost"] = float(job.parent is not None and not is_resumed)
    metrics["train/episodes"] = float(len(episodes))
    answer = TrainAnswer(model=None, reason="", metrics=metrics, agents={})
    with tempfile.TemporaryDirectory(prefix="troupe-team-") as scratch:
        folder = Path(scratch)
        learner.save(folder)
        write_signal(folder, signal)
        (folder / RESULT_FILE).write_text(answer.to_text())
        ref = _commit(store, job, folder)
    logger.info("committed version %d of the team's learner after %d episodes", job.version, len(episodes))
    return replace(answer, model=ref, parts=train_parts(began, ends | {"store": time.time()}))


def _commit(store: WeightStore, job: TrainJob, folder: Path) -> ModelVersionRef:
    return store.commit(
        folder,
        model_group=TEAM,
        version=job.version,
        parent=job.parent_version,
        run_id=job.run_id,
        iteration=job.iteration,
        probe=Probe(sequences=(), logprobs=()),
        note=f"{job.train.algorithm}, mixer {job.train.team.mixer}",
    )
