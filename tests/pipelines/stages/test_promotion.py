"""Moving the champion by hand: the aliases that follow, weights that are gone, two at once. Engines and gateway are not real."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from stage_records import collected, evaluated, finish, model_ref, scored, team_score, trained
from typer.testing import CliRunner

from pipelines.cli import service
from pipelines.cli.main import app
from pipelines.config.run_config import load_config
from pipelines.release import by_hand, production, traffic
from pipelines.release.production import move_champion
from pipelines.run.champions import champion_version, followed, history, set_champion
from pipelines.run.run import Run, plain
from pipelines.stages import promote as promotion
from pipelines.stages.steps import run_stage
from pipelines.stages.train import make_train_job
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Evaluated
from stores.registry.registry import CHAMPION, PREVIOUS
from stores.registry.team import Team
from stores.types import ModelVersionRef
from stores.weights.manifest import Probe

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUP = "team"


class Registry:
    """Aliases, and teams by version."""

    def __init__(self) -> None:
        self.aliases: dict[str, int] = {}
        self.teams: dict[int, Team] = {}

    def set_alias(self, name: str, alias: str, version: int) -> None:
        if version not in self.teams:
            raise ValueError(f"no team {version}")
        self.aliases[alias] = version

    def remove_alias(self, name: str, alias: str) -> None:
        self.aliases.pop(alias, None)

    def load(self, name: str, version: int | str) -> tuple[int, Team]:
        number = self.aliases[version] if isinstance(version, str) else version
        return number, self.teams[number]


def run_in(folder: Path, registry: Registry) -> Run:
    run = Run(load_config(SMALL, {"storage.root": str(folder)}))
    run.__dict__["registry"] = registry
    return run


def team_of(ref: ModelVersionRef, version: int) -> Team:
    return Team(
        workflow="w:W",
        prompts={},
        credit={},
        models={GROUP: ref},
        git_commit="",
        run_id="small",
        iteration=version,
        evaluation={},
    )


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Registry, list[str]]:
    """A run with three team versions whose weights are real, and what was done to engines and gateway."""
    registry, done = Registry(), list[str]()
    run = run_in(tmp_path, registry)
    assert list(run.config.model_groups) == [GROUP]
    for version in (1, 2, 3):
        folder = tmp_path / f"made-{version}"
        folder.mkdir()
        save_file({"w": np.full(4, version, np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        probe = Probe(sequences=((1, 2),), logprobs=((-1.0,),))
        ref = run.weights.commit(
            folder, model_group=GROUP, version=version, parent=None, run_id="small", iteration=version, probe=probe
        )
        registry.teams[version] = team_of(ref, version)

    def put(run: Run, version: int, team: Team, **more: Any) -> dict[str, Any]:
        done.append(f"put {version}")
        time.sleep(0.1)
        done.append(f"put {version} done, champion {champion_version(run)}")
        return {"team_version": version, "url": "http://here"}

    monkeypatch.setattr(by_hand, "serve", lambda run, models, **more: (done.append("serve"), ([], 0.0))[1])
    monkeypatch.setattr(production, "deployed_route", lambda run: SimpleNamespace())
    monkeypatch.setattr(production, "deploy_team", put)
    return run, registry, done


def test_previous_names_the_champion_before_and_after_a_rollback_where_the_next_one_goes(
    scene: tuple[Run, Registry, list[str]],
) -> None:
    run, registry, _ = scene

    def named() -> tuple[int | None, int | None]:
        return registry.aliases.get(CHAMPION), registry.aliases.get(PREVIOUS)

    set_champion(run, registry.teams[1].models, 1, reason="the first team")
    assert named() == (1, None)
    for version in (2, 3):
        set_champion(run, registry.teams[version].models, version, reason="better")
    assert named() == (3, 2)
    set_champion(run, registry.teams[3].models, 3, reason="better")
    assert named() == (3, 2) and len(history(run)) == 3, "a repeated promotion changes nothing"
    by_hand.rollback(run, to=None, reason="worse")
    assert named() == (2, 1)
    by_hand.rollback(run, to=None, reason="worse")
    assert named() == (1, None)
    with pytest.raises(ValueError, match="had no champion before 1"):
        by_hand.rollback(run, to=None, reason="worse")
    by_hand.promote_version(run, 3, reason="after all")
    assert named() == (3, 1)
    by_hand.promote_version(run, 1, reason="an old one, by hand")
    assert named() == (1, 3), "promoted, not rolled back"


@pytest.mark.parametrize(
    ("versions", "expected"), [([1], None), ([1, 2, 3], 2), ([1, 2, 3, 2], 1), ([1, 2, 3, 2, 4], 2), ([1, 2, 1], None)]
)
def test_a_history_that_does_not_tell_rollbacks_from_promotions_went_back_where_it_returned(
    versions: list[int], expected: int | None
) -> None:
    assert followed([{"team_version": version} for version in versions]) == expected


def test_a_team_whose_weights_are_damaged_or_gone_is_refused_before_an_engine_is_touched(
    scene: tuple[Run, Registry, list[str]],
) -> None:
    run, registry, done = scene
    set_champion(run, registry.teams[1].models, 1, reason="the first team")
    folder = Path(registry.teams[2].models[GROUP].uri)
    damaged = bytearray((folder / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (folder / "model.safetensors").write_bytes(damaged)
    with pytest.raises(
        ValueError, match=r"team version 2 .* group 'team': .*model.safetensors has sha256 .*nothing was"
    ):
        by_hand.promote_version(run, 2, reason="test")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.safetensors is missing.*nothing was changed"):
        by_hand.promote_version(run, 2, reason="test")
    run.weights.remove(GROUP, 3)
    for is_rollback in (False, True):
        with pytest.raises(ValueError, match=r"version 3 of team was removed, .*maintain.keep_versions.*; nothing"):
            by_hand.promote_version(run, 3, reason="test", is_rollback=is_rollback)
    assert done == [] and registry.aliases == {CHAMPION: 1} and champion_version(run) == 1


def test_of_two_promotions_at_once_one_waits_and_neither_is_half_of_each(
    scene: tuple[Run, Registry, list[str]], tmp_path: Path
) -> None:
    run, registry, done = scene
    set_champion(run, registry.teams[1].models, 1, reason="the first team")
    together = threading.Barrier(2)

    def promote(version: int) -> None:
        other = run_in(tmp_path, registry)  # as another process has it
        together.wait()
        move_champion(other, version, registry.teams[version], reason="test")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(promote, (2, 3)))
    first, last = (entry["team_version"] for entry in history(run)[1:])
    assert {first, last} == {2, 3}
    expected = [f"put {first}", f"put {first} done, champion 1", f"put {last}", f"put {last} done, champion {first}"]
    assert done == expected
    assert registry.aliases == {CHAMPION: last, PREVIOUS: first} and champion_version(run) == last


def test_a_rollback_to_a_team_whose_predecessor_was_deleted_leaves_none_before_it(
    scene: tuple[Run, Registry, list[str]],
) -> None:
    """The champion had moved when the alias of a deleted version was refused: registry and journal said different ones for good."""
    run, registry, _ = scene
    for version in (1, 2, 3):
        set_champion(run, registry.teams[version].models, version, reason="test")
    models = registry.teams[2].models
    del registry.teams[1]
    set_champion(run, models, 2, reason="sent back", is_rollback=True)
    assert registry.aliases == {CHAMPION: 2} and champion_version(run) == 2 and len(history(run)) == 4


def test_a_number_that_begins_again_is_another_team_by_its_weights(scene: tuple[Run, Registry, list[str]]) -> None:
    """Where the registry was lost a new team gets the number of one that was sent back."""
    run, registry, _ = scene
    set_champion(run, registry.teams[2].models, 2, reason="test")
    set_champion(run, registry.teams[1].models, 1, reason="sent back", is_rollback=True)
    verdict = better_than(1)
    assert promotion._outdated(run, registry.teams[3].models, 2, verdict) is None
    again = promotion._outdated(run, registry.teams[2].models, 2, verdict)
    assert again is not None and again.verdict == "reject"


def test_a_champion_with_the_number_of_the_one_before_it_has_a_line_of_its_own(
    scene: tuple[Run, Registry, list[str]],
) -> None:
    """The first team that is promoted after the registry was lost has the number of the first team of all."""
    run, registry, _ = scene
    for models in (registry.teams[1].models, registry.teams[2].models, registry.teams[2].models):
        set_champion(run, models, 1, reason="test")
    assert [entry["policy_versions"] for entry in history(run)] == [{GROUP: 1}, {GROUP: 2}]
    assert registry.aliases == {CHAMPION: 1}, "the one before it is in no registry"


def test_serving_the_champion_beside_a_promotion_deploys_the_new_one(
    scene: tuple[Run, Registry, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, registry, done = scene
    set_champion(run, registry.teams[1].models, 1, reason="the first team")
    loads_new, put = threading.Event(), production.deploy_team

    def put_slowly(run: Run, version: int, team: Team, **more: Any) -> Told:
        loads_new.set()
        return put(run, version, team, **more)

    monkeypatch.setattr(production, "deploy_team", put_slowly)
    monkeypatch.setattr(service, "existing_run", lambda name, root: run_in(tmp_path, registry))
    monkeypatch.setattr(Run, "begin", lambda run, **how: None)
    monkeypatch.setattr(service, "_connect", lambda address: None)
    with ThreadPoolExecutor(1) as pool:
        promotion_under_way = pool.submit(move_champion, run, 2, registry.teams[2], reason="test")
        assert loads_new.wait(30)
        served = CliRunner().invoke(app, ["serve", "small@champion"])
        promotion_under_way.result()
    assert served.exit_code == 0, served.output
    assert done[-1] == "put 2 done, champion 2" and not any(line.startswith("put 1") for line in done)


Told = dict[str, Any]


def better_than(champion: int) -> Evaluated:
    """The gate's verdict on version 2."""
    return evaluated(promotes=(GROUP,), champion=team_score(policy_versions={GROUP: champion}))


@pytest.mark.parametrize("how", ["never", "direct", "canary"])
@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([3], (3, "inconclusive", "compared with: {'team': 1} then, {'team': 3} now")),
        ([2], (2, "promote", "gain +0.2")),
        ([2, 3], (3, "inconclusive", "compared with: {'team': 1} then, {'team': 3} now")),
        ([2, 1], (1, "reject", "team version 2 has been the champion already, and was sent back")),
    ],
    ids=["moved by hand", "killed after it moved it", "killed, then moved by hand", "killed, then rolled back"],
)
def test_a_verdict_against_a_champion_that_is_champion_no_more_promotes_nothing(
    scene: tuple[Run, Registry, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    moves: list[int],
    expected: tuple[int, str, str],
) -> None:
    run, registry, done = scene
    run.config = load_config(SMALL, {"storage.root": run.config.storage.root, "promote.deploy": how})
    for version in (1, *moves):
        set_champion(run, registry.teams[version].models, version, reason="test", is_rollback=version == moves[-1] == 1)
    now = SimpleNamespace(champion=SimpleNamespace(team_version=moves[-1]))
    monkeypatch.setattr(production, "deployed_route", lambda run: now)
    monkeypatch.setattr(promotion, "register_team", lambda run, models, **more: 2)
    finish(run, 1, trained(model=registry.teams[2].models[GROUP]), GROUP)
    finish(run, 1, better_than(1))
    run_stage(run, "promote", 1)
    decided = run.iteration(1).decided
    assert (champion_version(run), registry.aliases[CHAMPION], decided.verdict) == (
        expected[0],
        expected[0],
        expected[1],
    )
    assert decided.team_version == 2 and decided.condition.endswith(expected[2])
    assert ("put 2" in done) == (decided.verdict == "promote" and how != "never")


def test_a_promotion_that_was_killed_between_its_two_lines_in_the_journal_is_finished(
    scene: tuple[Run, Registry, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history named the new champion already, the other line the old one: the repetition took it for one that was sent back."""
    run, registry, _ = scene
    set_champion(run, registry.teams[1].models, 1, reason="the first team")
    before = run.journal.value(run.run_id, RunValue.CHAMPION)
    assert before is not None
    set_champion(run, registry.teams[2].models, 2, reason="gain +0.2")
    run.journal.put_value(run.run_id, RunValue.CHAMPION, before)
    monkeypatch.setattr(promotion, "register_team", lambda run, models, **more: 2)
    finish(run, 1, trained(model=registry.teams[2].models[GROUP]), GROUP)
    finish(run, 1, better_than(1))
    run_stage(run, "promote", 1)
    assert (run.iteration(1).decided.verdict, champion_version(run), registry.aliases[CHAMPION]) == ("promote", 2, 2)
    assert [entry["team_version"] for entry in history(run)] == [1, 2]


@pytest.mark.parametrize(
    ("how", "canary", "verdict", "champion"),
    [
        ("never", None, "promote", 2),
        ("direct", None, "promote", 2),
        ("canary", "promoted", "promote", 2),
        ("canary", "sent_back", "reject", 1),
        ("canary", "undecided", "inconclusive", 1),
    ],
)
def test_a_promotion_by_the_gate_goes_into_service_as_the_config_says(
    scene: tuple[Run, Registry, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    canary: str | None,
    verdict: str,
    champion: int,
) -> None:
    run, registry, done = scene
    run.config = load_config(SMALL, {"storage.root": run.config.storage.root, "promote.deploy": how})
    set_champion(run, registry.teams[1].models, 1, reason="the first team")
    now = SimpleNamespace(champion=SimpleNamespace(team_version=1))
    monkeypatch.setattr(production, "deployed_route", lambda run: now)

    def roll_out(run: Run, version: int, team: Team) -> Told:
        if canary == "promoted":
            move_champion(run, version, team, reason="canary")
        return {"verdict": canary, "reason": "what was seen"}

    monkeypatch.setattr(traffic, "roll_out", roll_out)
    monkeypatch.setattr(promotion, "register_team", lambda run, models, **more: 2)
    finish(run, 1, trained(model=registry.teams[2].models[GROUP]), GROUP)
    finish(run, 1, better_than(1))
    run_stage(run, "promote", 1)
    decided = run.iteration(1).decided
    assert (decided.verdict, decided.team_version) == (verdict, 2)
    assert (champion_version(run), registry.aliases[CHAMPION]) == (champion, champion)
    assert ("put 2" in done) == (how == "direct" or canary == "promoted")
    assert decided.condition == ("gain +0.2" if canary is None else f"gain +0.2; canary {canary}: what was seen")


def test_a_promotion_whose_weights_the_idle_set_refuses_fails_its_stage_and_the_champion_stays(
    scene: tuple[Run, Registry, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, registry, _ = scene
    set_champion(run, registry.teams[1].models, 1, reason="the first team")

    def refuse(run: Run, version: int, team: Team) -> Told:
        raise ValueError("model.safetensors is missing, the manifest lists it")

    monkeypatch.setattr(production, "deploy_team", refuse)
    with pytest.raises(ValueError, match="is missing"):
        move_champion(run, 2, registry.teams[2], reason="test")
    assert registry.aliases == {CHAMPION: 1} and champion_version(run) == 1


@pytest.mark.parametrize(("on_reject", "champion"), [("champion", 2), ("continue", None)])
def test_a_train_job_names_the_champion_that_rejections_go_back_to(
    tmp_path: Path, on_reject: str, champion: int | None
) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path), "promote.on_reject": on_reject}))
    iteration: Any = SimpleNamespace(number=4, source=None, collected=collected(), scored=scored())
    parent = model_ref(GROUP, 3)
    assert make_train_job(run, iteration, GROUP, parent=parent).champion is None, "before there is one"
    models = {GROUP: plain(model_ref(GROUP, 2))}
    run.journal.put_value(run.run_id, RunValue.CHAMPION, {"team_version": 1, "models": models})
    assert make_train_job(run, iteration, GROUP, parent=parent).champion == champion
    assert make_train_job(run, iteration, "team", parent=parent, is_team=True).champion is None
