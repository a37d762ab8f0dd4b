"""Which team a rollback goes to, and what a team plays by hand. With engines both are in tests/e2e/test_airflow.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import answers_five
import pytest
from answers_five import SMALL, Played, sampled_as, write_tasks
from records import MakeTrace
from stage_records import collected, decided, finish, trained

from pipelines.config.run_config import load_config
from pipelines.evaluation import played as played_module
from pipelines.release import by_hand as moves
from pipelines.run.iteration import NotDone
from pipelines.run.run import Run, plain
from pipelines.runners.by_request import evaluate_team
from stores.types import ModelVersionRef, Purpose

pytestmark = pytest.mark.test

by_hand = answers_five.by_hand


class Moved(Exception):
    """The version that a rollback would move to."""


def rolled_back(folder: Path, monkeypatch: pytest.MonkeyPatch, champions: list[int], to: int | None = None) -> int:
    run = Run(load_config(SMALL, {"storage.root": str(folder)}))
    run.journal.put_value("small", "champion", {"team_version": champions[-1], "models": {}})
    run.journal.put_value("small", "champions", {"history": [{"team_version": v} for v in champions]})

    def move(run: Run, version: int, *, reason: str, is_rollback: bool) -> dict[str, Any]:
        raise Moved(version)

    monkeypatch.setattr(moves, "promote_version", move)
    with pytest.raises(Moved) as moved:
        moves.rollback(run, to=to, reason="test")
    return int(moved.value.args[0])


@pytest.mark.parametrize(
    ("champions", "expected"),
    [([1, 2, 3], 2), ([1, 2, 3, 2], 1), ([1, 2, 3, 2, 4], 2)],
    ids=["the one before", "twice in a row goes two back", "a new one after a rollback"],
)
def test_a_rollback_goes_to_the_champion_that_the_present_one_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, champions: list[int], expected: int
) -> None:
    assert rolled_back(tmp_path, monkeypatch, champions) == expected


def test_a_rollback_may_name_an_earlier_champion_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rolled_back(tmp_path, monkeypatch, [1, 2, 3], to=1) == 1
    with pytest.raises(ValueError, match=r"7 of 'small' never was champion \(these were: 1, 2, 3\)"):
        rolled_back(tmp_path, monkeypatch, [1, 2, 3], to=7)
    with pytest.raises(ValueError, match="had no champion before 1"):
        rolled_back(tmp_path, monkeypatch, [1])


def test_a_file_of_tasks_is_scored_by_its_own_answers_whatever_was_played_under_its_ids(
    by_hand: tuple[Run, Played], tmp_path: Path
) -> None:
    run, played = by_hand
    tasks = write_tasks(tmp_path / "a.jsonl", "5", "6")
    assert evaluate_team(run, "champion", [tasks])["accuracy"] == 0.5
    assert evaluate_team(run, "champion", [tasks])["accuracy"] == 0.5
    assert played == {"t0": 1, "t1": 1}, "the same file again is what it was"
    corrected = evaluate_team(run, "champion", [write_tasks(tasks, "5", "5")])
    other = evaluate_team(run, "champion", [write_tasks(tmp_path / "b.jsonl", "6", "6")])
    assert [(r["accuracy"], r["num_tasks"]) for r in (corrected, other)] == [(1.0, 2), (0.0, 2)]
    assert played == {"t0": 3, "t1": 3}


def test_several_files_are_told_apart_at_each_k_up_to_the_one_that_was_asked_for(
    by_hand: tuple[Run, Played], tmp_path: Path
) -> None:
    run, played = by_hand
    files = [write_tasks(tmp_path / "math.jsonl", "5", "6"), write_tasks(tmp_path / "aime.jsonl", "5")]
    found = evaluate_team(run, "champion", files, k=4, temperature=0.6)
    assert found["accuracy"] == pytest.approx(2 / 3 / 2) and (found["k"], found["temperature"]) == (4, 0.6)
    # two of four episodes solve it: 1 - C(2, k) / C(4, k)
    solved = {1: 1 / 2, 2: 5 / 6, 3: 1.0, 4: 1.0}
    assert found["sources"]["aime"] | {"ci95": None} == {
        "accuracy": 0.5,
        "ci95": None,
        "num_tasks": 1,
        "pass_at_k": pytest.approx(solved),
    }
    assert found["sources"]["math"]["pass_at_k"] == pytest.approx({k: share / 2 for k, share in solved.items()})
    assert found["pass_at_k"] == pytest.approx({k: share * 2 / 3 for k, share in solved.items()})
    assert played == {"math/t0": 4, "math/t1": 4, "aime/t0": 4}

    fewer = evaluate_team(run, "champion", files, k=2, temperature=0.6)
    assert (fewer["accuracy"], fewer["k"], set(fewer["pass_at_k"])) == (pytest.approx(2 / 3), 2, {1, 2})
    assert set(played.values()) == {4}, "the first two of them are stored"
    evaluate_team(run, "champion", files, k=2, temperature=1.0)
    assert set(played.values()) == {6}, "another temperature is another occasion"


def test_requests_whose_figures_would_say_nothing_are_refused(by_hand: tuple[Run, Played], tmp_path: Path) -> None:
    run, played = by_hand
    (tmp_path / "other").mkdir()
    files = [write_tasks(tmp_path / "a.jsonl", "5"), write_tasks(tmp_path / "other" / "a.jsonl", "6")]
    with pytest.raises(ValueError, match=r"a\.jsonl and --tasks .*other/a\.jsonl both hold tasks of the data set 'a'"):
        evaluate_team(run, "champion", files)
    with pytest.raises(ValueError, match="--k 4: at temperature 0 all 4 episodes of a task are alike"):
        evaluate_team(run, "champion", files[:1], k=4, temperature=0.0)
    assert not played


def test_an_episode_that_another_version_had_a_part_in_is_no_result(
    by_hand: tuple[Run, Played], make_trace: MakeTrace
) -> None:
    run, _ = by_hand
    where: dict[str, Any] = {"run_id": run.run_id, "iteration": 1, "purpose": Purpose.GATE, "team_key": "team"}
    run.traces.write_episodes([make_trace(0, **where), make_trace(2, **where, is_version_mixed=True)])
    score = played_module.Played(run, sampled_as(run.traces.pin_episodes(**where)), {}).score(run)
    assert (score.num_tasks, score.num_failed, score.accuracy) == (1, 1, 1.0)


def test_an_iteration_that_may_go_back_to_the_champion_does_not_begin_before_the_gate_has_decided(
    tmp_path: Path,
) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path), "promote.on_reject": "champion"}))
    finish(run, 1, trained("team"), model_group="team")
    with pytest.raises(NotDone, match="iteration 1 of run 'small' needs promote, which is not done"):
        run.samplers(2)
    finish(run, 1, decided(verdict="promote"))
    assert run.samplers(2)["team"].version == 1


def test_an_iteration_trains_the_versions_that_it_collected_with_though_the_champion_moves(tmp_path: Path) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path), "promote.on_reject": "champion"}))
    models = [ModelVersionRef(model_group="team", version=v, uri="", manifest_sha256="") for v in range(4)]
    run.__dict__["weights"] = SimpleNamespace(ref=lambda group, version: models[version])

    def set_champion(version: int) -> None:
        run.journal.put_value(
            "small", "champion", {"team_version": version, "models": {"team": plain(models[version])}}
        )

    finish(run, 1, decided(verdict="reject"))
    set_champion(3)
    assert run.parents(2) == {"team": models[3]}
    finish(run, 2, collected(policy_versions={"team": 3}))
    set_champion(1)
    assert run.parents(2) == {"team": models[3]}
