"""Which team a rollback goes to, and what a team plays by hand. With engines both are in tests/e2e/test_airflow.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import MakeTrace
from stage_records import collected, decided, finish

from pipelines.cluster import connect
from pipelines.config.run_config import load_config
from pipelines.episodes.sampling import Sampled
from pipelines.evaluation import played as played_module
from pipelines.monitoring import served_windows
from pipelines.release import by_hand as moves
from pipelines.report.inspect import evaluate_team
from pipelines.run.run import Run, plain
from pipelines.runners import watch_champion
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.team_spec import TeamSpec
from stores.traces import TraceStore
from stores.types import ModelVersionRef, Purpose, Task, TracesRef

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


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


Played = dict[str, int]
"""Episodes that were really played, by task id."""


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trace: MakeTrace) -> tuple[Run, Played]:
    """A run whose team answers 5 to everything; stores and keys are real, engines and registry are not."""
    for name, answers in {"test": ("5", "5"), "sentinel": ("5", "6")}.items():
        write_tasks(tmp_path / f"{name}.jsonl", *answers)
    changes = {f"tasks.{name}": {"path": str(tmp_path / f"{name}.jsonl")} for name in ("test", "sentinel")}
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path), **changes}))
    run.open()
    model = ModelVersionRef(model_group="team", version=2, uri="nowhere", manifest_sha256="")
    run.__dict__["registry"] = SimpleNamespace(
        load=lambda name, alias: (7, SimpleNamespace(models={"team": model})), show_watch=lambda *shown: None
    )
    run.__dict__["tracker"] = SimpleNamespace(log_metrics=lambda *shown, at: None, log_json=lambda *shown: None)
    monkeypatch.setattr(connect, "connect", lambda address: None)
    monkeypatch.setattr(played_module, "serve", lambda run, models: None)
    monkeypatch.setattr(served_windows, "gateway_answers", lambda run: [])
    played: Played = {}
    monkeypatch.setattr(played_module, "sample_episodes", fake_sampler(make_trace, played))
    return run, played


def fake_sampler(make_trace: MakeTrace, played: Played) -> Callable[..., Sampled]:
    """`sample_episodes` without engines: what is stored under its key is kept."""

    def sample(tasks: Sequence[Task], *, team_spec: TeamSpec, store: TraceStore, seed: int, **more: Any) -> Sampled:
        where = {name: more[name] for name in ("run_id", "iteration", "purpose")} | {"team_key": team_spec.team_key}
        for task in tasks:
            spec = EpisodeSpec(**where, task=task, episode_index=0, run_seed=seed)
            trace = replace(make_trace(**where), episode_id=spec.episode_id, task=task, answer="5")
            played[task.task_id] = played.get(task.task_id, 0) + store.write_episodes([trace])
        return sampled_as(store.pin_episodes(**where))

    return sample


def sampled_as(traces: TracesRef) -> Sampled:
    counts = dict.fromkeys(("num_new", "num_kept", "num_tokens"), 0)
    return Sampled(
        traces=traces,
        groups=(),
        statuses={},
        sampling_seconds=0.0,
        seconds=0.0,
        stopped_by=None,
        tasks_left=(),
        **counts,
    )


def write_tasks(file: Path, *answers: str) -> Path:
    rows = [{"id": f"t{i}", "question": "2 + 3 = ?", "answer": answer} for i, answer in enumerate(answers)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_a_file_of_tasks_is_scored_by_its_own_answers_whatever_was_played_under_its_ids(
    by_hand: tuple[Run, Played], tmp_path: Path
) -> None:
    run, played = by_hand
    tasks = write_tasks(tmp_path / "a.jsonl", "5", "6")
    assert evaluate_team(run, "champion", tasks)["accuracy"] == 0.5
    assert evaluate_team(run, "champion", tasks)["accuracy"] == 0.5
    assert played == {"t0": 1, "t1": 1}, "the same file again is what it was"
    corrected = evaluate_team(run, "champion", write_tasks(tasks, "5", "5"))
    other = evaluate_team(run, "champion", write_tasks(tmp_path / "b.jsonl", "6", "6"))
    assert [(r["accuracy"], r["num_tasks"]) for r in (corrected, other)] == [(1.0, 2), (0.0, 2)]
    assert played == {"t0": 3, "t1": 3}


def test_each_watching_plays_every_section_and_a_repeated_one_keeps_its_episodes(
    by_hand: tuple[Run, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, played = by_hand
    found = watch_champion.watch(run, "champion", ["test", "sentinel"])
    assert {name: section["accuracy"] for name, section in found["sections"].items()} == {"test": 1.0, "sentinel": 0.5}
    assert played == {"t0": 2, "t1": 2}

    def killed(tasks: Sequence[Task], **more: Any) -> Sampled:
        if tasks[1].answers == ("6",):
            raise KeyboardInterrupt
        return sampled(tasks, **more)

    sampled = played_module.sample_episodes
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(played_module, "sample_episodes", killed)
        watch_champion.watch(run, "champion", ["test", "sentinel"])
    assert played == {"t0": 3, "t1": 3}
    again = watch_champion.watch(run, "champion", ["test", "sentinel"])
    assert again["sections"] == found["sections"] and (found["state"], again["state"]) == ("learning", "sound")
    assert played == {"t0": 4, "t1": 4}, "the test tasks were kept, the sentinel ones played anew"


def test_an_episode_that_another_version_had_a_part_in_is_no_result(
    by_hand: tuple[Run, Played], make_trace: MakeTrace
) -> None:
    run, _ = by_hand
    where: dict[str, Any] = {"run_id": run.run_id, "iteration": 1, "purpose": Purpose.GATE, "team_key": "team"}
    run.traces.write_episodes([make_trace(0, **where), make_trace(2, **where, is_version_mixed=True)])
    score = played_module.Played(run, sampled_as(run.traces.pin_episodes(**where)), {}).score(run)
    assert (score.num_tasks, score.num_failed, score.accuracy) == (1, 1, 1.0)


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
