"""Overlap by number: which version samples and which is trained from, and that no stage comes before what it reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from stage_records import collected, decided, finish, trained

from pipelines.config.run_config import load_config
from pipelines.config.sections import LoopConfig
from pipelines.run.iteration import NotDone
from pipelines.run.run import Run, plain
from pipelines.stages.table import STAGES, Step, engine_order, needs
from stores.types import ModelVersionRef

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
MODELS = [ModelVersionRef(model_group="team", version=v, uri="", manifest_sha256="") for v in range(9)]


def opened(folder: Path, *, max_lag: int, on_reject: str = "continue") -> Run:
    changes = {"storage.root": str(folder), "loop.max_lag": max_lag, "promote.on_reject": on_reject}
    run = Run(load_config(SMALL, changes))
    run.__dict__["weights"] = SimpleNamespace(
        ref=lambda group, version: MODELS[version], removed=lambda group, version: None
    )
    return run


def set_champion(run: Run, version: int) -> None:
    run.journal.put_value(run.run_id, "champion", {"team_version": version, "models": {"team": plain(MODELS[version])}})


def versions(models: dict[str, ModelVersionRef]) -> int:
    return models["team"].version


def train(run: Run, iteration: int) -> None:
    finish(run, iteration, trained("team", iteration, model=MODELS[iteration]), "team")


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_iteration_is_sampled_by_what_lag_iterations_earlier_was_trained_from(tmp_path: Path, lag: int) -> None:
    run = opened(tmp_path, max_lag=lag)
    for iteration in range(1, 6):
        train(run, iteration)
    table = {
        0: [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)],
        1: [(0, 0), (0, 1), (1, 2), (2, 3), (3, 4)],
        2: [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4)],
    }
    assert [(versions(run.samplers(k)), versions(run.parents(k))) for k in range(1, 6)] == table[lag]


def test_what_a_rejected_iteration_left_samples_nothing_that_follows_the_return_to_the_champion(
    tmp_path: Path,
) -> None:
    run = opened(tmp_path, max_lag=1, on_reject="champion")
    set_champion(run, 1)
    for iteration, verdict in ((1, "promote"), (2, "inconclusive"), (3, "reject")):
        train(run, iteration)
        finish(run, iteration, decided(verdict=verdict))
    train(run, 4)
    finish(run, 4, decided(verdict="inconclusive"))
    assert [(versions(run.samplers(k)), versions(run.parents(k))) for k in (3, 4, 5)] == [(1, 2), (2, 1), (1, 4)]


def test_parents_wait_for_the_gate_and_stay_whoever_is_champion_later(tmp_path: Path) -> None:
    run = opened(tmp_path, max_lag=1, on_reject="champion")
    set_champion(run, 0)
    train(run, 1)
    with pytest.raises(NotDone, match="needs promote, which is not done"):
        run.parents(2)
    finish(run, 1, decided(verdict="reject"))
    assert versions(run.parents(2)) == 0
    set_champion(run, 1)
    assert versions(run.parents(2)) == 0


def test_what_sampled_is_not_what_is_trained_from(tmp_path: Path) -> None:
    run = opened(tmp_path, max_lag=1)
    for iteration in (1, 2):
        train(run, iteration)
    finish(run, 3, collected(policy_versions={"team": 1}))
    assert (versions(run.samplers(3)), versions(run.parents(3))) == (1, 2)


def stages_in_order(iterations: int, lag: int, *, returns_to_champion: bool) -> list[Step]:
    """One way through all stages: score and train as late as the engines' order lets them be."""
    config = load_config(
        SMALL, {"loop.max_lag": lag, "promote.on_reject": "champion" if returns_to_champion else "continue"}
    )
    done: list[Step] = []

    def do(step: Step) -> None:
        if step not in done:
            for need in needs(config, step):
                assert need.stage in ("score", "train") or need in done, f"{step} comes before {need}"
                do(need)
            done.append(step)

    for step in engine_order(iterations, lag):
        do(step)
    return done


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("returns_to_champion", [False, True])
@pytest.mark.parametrize("iterations", [1, 2, 5, 8])
def test_the_order_of_the_engines_asks_for_nothing_that_comes_later(
    lag: int, returns_to_champion: bool, iterations: int
) -> None:
    done = stages_in_order(iterations, lag, returns_to_champion=returns_to_champion)
    assert sorted(done) == sorted(Step(k, stage) for k in range(1, iterations + 1) for stage in STAGES)


def test_without_lag_the_order_is_that_of_the_loop() -> None:
    assert [(s.iteration, s.stage) for s in stages_in_order(3, 0, returns_to_champion=False)] == [
        (k, stage) for k in (1, 2, 3) for stage in STAGES
    ]
    assert [str(s.iteration) + s.stage[0] for s in engine_order(4, 1)] == (
        ["1c", "2c", "1s", "1e", "1p", "3c", "2s", "2e", "2p", "4c", "3s", "3e", "3p", "4s", "4e", "4p"]
    )
    assert [LoopConfig(max_lag=2).sampler_of(k) for k in (1, 2, 3, 4)] == [1, 1, 1, 2]
