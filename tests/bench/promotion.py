"""promotion: a better team, one with damaged weights, and one that has learnt to pad what it says; what gate and traffic make of them.

train, six iterations ──────────────────────────────────> the gate promotes ──> champion in service
champion + noise; champion, shown padding and trained on
by a rule that pays for words ──> the gate refuses ──> forced in ──> sent back by its answers
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.cluster.connect import connect
from pipelines.config.run_config import load_config
from pipelines.config.sections import TrafficConfig
from pipelines.release.production import deploy_team
from pipelines.release.traffic import guard_deployed, roll_out
from pipelines.report.progress import Screen
from pipelines.run.run import Run
from pipelines.runners.local_runner import train_team
from pipelines.stages.evaluate import evaluate
from stores.registry.team import Team
from stores.types import ModelVersionRef
from tests.bad_teams import DEGRADED, asked_all_the_time, degraded
from tests.bench.figures import Figure
from tests.bench.setting import DEMO
from tests.servers import free_port

ITERATIONS = 6
PADDED = DEGRADED + 1
AGENTS = ("solver", "verifier", "refiner", "finalizer")
ROOM: Mapping[str, Any] = {f"agents.{agent}.max_tokens": 64 for agent in AGENTS} | {"serve.max_model_len": 384}
"""For saying much more than is needed."""
SHOWN_PADDING: Mapping[str, Any] = {
    "warmstart.tiny_model": None,
    "warmstart.demonstrator": "tests.bench.padding_demonstrator:demonstrate",
    "warmstart.optimizer.lr": 2.5e-3,
}
"""A trained policy is too sure of itself to find by sampling alone that words pay: six iterations left its length as it was."""
GUARD_S = 240.0


def measure(folder: Path) -> list[Figure]:
    """One run in the demo's shape, and one that goes on from its champion by a bad rule."""
    shape = ROOM | {"storage": {"root": str(folder)}, "iterations": ITERATIONS, "evaluate.every": ITERATIONS}
    made = shape | {"warmstart.tiny_model.max_position": 384}
    _trained({"run": "promotion", **made})
    traffic = TrafficConfig(shares=(0.5,), answers_per_step=100, poll_s=0.2)
    config = load_config(DEMO, {"run": "promotion", **made, "gateway": {"port": free_port()}})
    run = Run(config.model_copy(update={"traffic": traffic}))
    version, team = run.registry.load(run.team_name, "champion")
    padded = _padded(run, team, shape)
    connect()
    bad = {DEGRADED: ("noise on its weights", degraded(team, folder / "degraded")), PADDED: ("padded answers", padded)}
    decided = run.iteration(ITERATIONS).decided
    figures = [_as_expected("the gate on the trained team", decided.verdict == "promote", decided.condition)]
    for number, (what, one) in bad.items():
        verdict = evaluate(_Candidate(run, one), number * ITERATIONS)
        figures.append(_as_expected(f"the gate on {what}", verdict.verdict == "reject", verdict.condition))
    return figures + _deployed(run, version, team, bad)


def _deployed(run: Run, version: int, team: Team, bad: Mapping[int, tuple[str, Team]]) -> list[Figure]:
    figures = []
    deploy_team(run, *run.registry.load(run.team_name, 1))
    with asked_all_the_time(run) as answered:
        found = roll_out(run, version, team)
        figures.append(_as_expected("canary of the trained team", found["verdict"] == "promoted", found["reason"]))
        for number, (what, one) in bad.items():
            deploy_team(run, number, one)
            began = time.perf_counter()
            sent = guard_deployed(run, seconds=GUARD_S)
            told = f"after {time.perf_counter() - began:.0f} s: {sent['reason']}"
            is_back = (sent["verdict"], sent["team_version"]) == ("sent_back", version)
            figures.append(_as_expected(f"forced in, {what}", is_back, told))
    failed = [answer for answer in answered if not answer.startswith(f"{run.team_name}@")]
    return [
        *figures,
        Figure("requests that failed meanwhile", float(len(failed)), most=0.0, note=f"of {len(answered)}"),
    ]


class _Candidate(Run):
    """The run, with these models as what an iteration has trained."""

    def __init__(self, run: Run, team: Team) -> None:
        super().__init__(run.config)
        self._models = dict(team.models)

    def trained(self, iteration: int) -> dict[str, ModelVersionRef]:
        """The same for every iteration."""
        return self._models


def _trained(changes: Mapping[str, Any]) -> None:
    """Trains in a process of its own, with which its engines and trainers end: those in service need the memory."""
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(changes,))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"training {changes['run']} ended with {process.exitcode}: see its output above")


def _train(changes: Mapping[str, Any]) -> None:
    train_team(load_config(DEMO, changes), screen=Screen())


def _padded(run: Run, team: Team, shape: Mapping[str, Any]) -> Team:
    """The champion, shown what padding is, and trained on by a rule that pays for words."""
    groups = {f"model_groups.{group}.model": ref.uri.removeprefix("file://") for group, ref in team.models.items()}
    rule = {"path": "tests.bench.paid_by_length:PaidByLength", "settings": {"weight": 0.5, "max_tokens": 64}}
    changes = {"run": "padded", **shape, **groups, **SHOWN_PADDING, "credit": rule}
    _trained(changes)
    other = Run(load_config(DEMO, changes))
    trained = other.trained(ITERATIONS)
    models = {
        group: other.weights.commit(
            Path(ref.uri.removeprefix("file://")),
            model_group=group,
            version=PADDED,
            parent=None,
            run_id="padded",
            iteration=PADDED,
            probe=other.weights.manifest(ref).probe,
        )
        for group, ref in trained.items()
    }
    return dataclasses.replace(team, models=models)


def _as_expected(name: str, is_expected: bool, note: str) -> Figure:
    return Figure(name, float(is_expected), least=1.0, note=note)
