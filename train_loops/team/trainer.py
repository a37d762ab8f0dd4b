"""team_trainer: one order of the team -> a committed version of its learner, with the signal for the model groups.

Runs on worker 0 of the first model group's trainer, before that group's own order. Reads pinned traces and rewards of all
model groups; killed and ordered again it ends with the same version.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stores.manifest import Probe
from stores.traces import TraceStore
from stores.weights import WeightStore
from train_loops.config import TEAM
from train_loops.team.signal import write_signal
from train_loops.train_job import Order, parse_order

logger = logging.getLogger(__name__)

RESULT_FILE = "train_result.json"


def train_team_learner(data: Mapping[str, Any]) -> dict[str, Any]:
    """Does an order whose model group is `TEAM`; returns the result (see `TrainerHandle.order`)."""
    from train_loops.team.episodes import team_episodes
    from train_loops.team.learner import TeamLearner

    order = parse_order(data)
    store = WeightStore(order.weights_uri)
    existing = store.ref(TEAM, order.version)
    if existing is not None:
        return json.loads((store.fetch(existing) / RESULT_FILE).read_text()) | {"model": asdict(existing)}
    traces = TraceStore(order.traces_uri)
    episodes = team_episodes(
        list(traces.read_traces(order.traces)),
        {r.episode_id: r for r in traces.read_rewards(order.rewards)},
        credit_kind=order.credit_kind,
        statuses=order.train.train_statuses,
        train_mixed_versions=order.train.train_mixed_versions,
    )
    if not episodes:
        return {"model": None, "reason": "no episode with a rewarded turn", "metrics": {}, "agents": {}}
    learner = TeamLearner(order.train, seed=order.seed - order.iteration)
    is_resumed = order.parent is not None and learner.load(store.fetch(order.parent))
    signal, metrics = learner.learn(episodes, seed=order.seed)
    metrics["train/is_state_lost"] = float(order.parent is not None and not is_resumed)
    result = {"reason": "", "metrics": metrics | {"train/episodes": float(len(episodes))}, "agents": {}}
    with tempfile.TemporaryDirectory(prefix="troupe-team-") as scratch:
        folder = Path(scratch)
        learner.save(folder)
        write_signal(folder, signal)
        (folder / RESULT_FILE).write_text(json.dumps(result))
        ref = _commit(store, order, folder)
    logger.info("committed version %d of the team's learner after %d episodes", order.version, len(episodes))
    return result | {"model": asdict(ref)}


def _commit(store: WeightStore, order: Order, folder: Path) -> Any:
    return store.commit(
        folder,
        model_group=TEAM,
        version=order.version,
        parent=order.parent_version,
        run_id=order.run_id,
        iteration=order.iteration,
        probe=Probe(sequences=(), logprobs=()),
        note=f"{order.train.algorithm}, mixer {order.train.team.mixer}",
    )
