"""team_signal: the numbers that the learner of the whole team hands to the model groups' trainers, by turn or by episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stores.weights.store import WeightStore
from train_loops.signal.happo import log_factor
from train_loops.train_job import TrainJob

SIGNAL_FILE = "team_signal.json"
"""Lies in a version of the team's learner: [[episode id, turn index, value], ...] by kind of signal."""
LOG_RATIOS_FILE = "log_ratios.json"
"""Lies in a model group's version trained by HAPPO: its log ratio of every episode."""

TurnKey = tuple[str, int]
"""Episode id and turn index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSignal:
    """The signal for one iteration's turns, of all model groups."""

    advantages: Mapping[TurnKey, float] | None = None
    """MAPPO and HAPPO: the advantage of each turn, for all of its tokens, whitened as the settings say."""
    credit: Mapping[TurnKey, float] | None = None
    """VDN and QMIX: replaces the turn's reward."""
    log_factor: Mapping[str, float] = field(default_factory=dict)
    """HAPPO: log M of each episode, from the groups that were updated before this one; none: 0."""


def write_signal(folder: Path, signal: TeamSignal) -> None:
    """Writes advantages and credit as `SIGNAL_FILE`."""
    kinds = {"advantages": signal.advantages, "credit": signal.credit}
    data = {
        kind: None if values is None else [[*key, value] for key, value in values.items()]
        for kind, values in kinds.items()
    }
    (folder / SIGNAL_FILE).write_text(json.dumps(data))


def read_team_signal(store: WeightStore, job: TrainJob) -> TeamSignal | None:
    """Reads the signal of `job.team`, with log M from the versions that were trained before; None without a team's learner."""
    if job.team is None:
        return None
    data = json.loads((store.fetch(job.team) / SIGNAL_FILE).read_text())
    values_of = {
        kind: None if rows is None else {(episode, turn): value for episode, turn, value in rows}
        for kind, rows in data.items()
    }
    log_ratios = []
    for ref in job.updated:
        path = store.fetch(ref) / LOG_RATIOS_FILE
        log_ratios.append(json.loads(path.read_text()) if path.is_file() else {})
    return TeamSignal(
        advantages=values_of["advantages"],
        credit=values_of["credit"],
        log_factor=log_factor(log_ratios),
    )
