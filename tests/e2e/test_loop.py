"""The whole loop on the real parts, as a user runs it: `troupe train`, killed and started again.

undisturbed:  ───────────────────────────────────────────────> report
disturbed:    ── collect ╳ ── train ╳ ───────────────────────> the same report
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from servers import Postgres

from pipelines.config.run_config import load_config
from pipelines.report.inspect import export_version
from pipelines.report.record import record
from pipelines.run.kept_weights import checkpoint_files, version_of_checkpoint
from pipelines.run.run import Run
from pipelines.stages.table import STAGES
from stores.journal import journal
from stores.types import Purpose, TracesRef
from tests.e2e.local_runs import (
    COMMAND,
    CONFIG,
    config_in,
    distance,
    finish,
    is_running,
    keys,
    kill_when,
    report_of,
    rows_of,
    start,
    troupe,
)
from tests.e2e.scraper import Scraper
from tests.pipelines.extensions.prometheus.test_observability import drawn, exported

pytestmark = pytest.mark.nightly

ITERATIONS = (1, 2)


@pytest.mark.test
def test_a_run_ends_with_a_report_that_has_every_figure(undisturbed: Run) -> None:
    report = report_of(undisturbed)
    assert report["iterations"] == 2
    assert report["before"]["num_tasks"] == report["after"]["num_tasks"] == 32
    assert report["versions"] == {"team": 2}
    assert set(report["funnel"]) == {"solver", "verifier", "refiner", "finalizer"}
    assert all(steps["trained"] > 0 for steps in report["funnel"].values())
    assert report["seconds"]["total"] >= report["seconds"]["iterations"] > 0
    assert report["delta_ci95"][0] <= report["delta"] <= report["delta_ci95"][1]
    page = (Path(undisturbed.folder) / "report.html").read_text()
    assert "finalizer" in page
    assert "<script src=" not in page
    assert len(report["waits"]) == 3 and "Who worked, who waited" in page
    events = json.loads((Path(undisturbed.folder) / "timeline.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    stages = {f"stage {name}" for name in ("collect", "score", "train team", "sync", "evaluate", "promote")}
    assert lanes == {"iterations", "engine team", "trainer team", "collectors", *stages}
    slices = {event["name"] for event in events if event["ph"] == "X"}
    assert slices >= {"iteration 1", "iteration 2", "collect", "calls", "load", "read", "learn", "store"}


@pytest.mark.test
def test_trainer_and_engine_agree_on_every_trained_turn(undisturbed: Run) -> None:
    gap = report_of(undisturbed)["logprob_gap"]
    assert 0 < gap["mean"] < 1e-3
    assert gap["max"] < 0.05


@pytest.mark.test
def test_every_replica_proved_each_version_in_place(undisturbed: Run) -> None:
    for iteration in ITERATIONS:
        proofs = undisturbed.iteration(iteration).synced.proofs
        assert [(p["version"], p["verdict"]) for p in proofs] == [(iteration, "proven")]
    pids = {undisturbed.iteration(k).synced.proofs[0]["pid"] for k in ITERATIONS}
    assert len(pids) == 1


@pytest.mark.test
def test_training_and_evaluation_never_share_an_episode(undisturbed: Run) -> None:
    traces = undisturbed.traces.find_traces(run_id="small", limit=10_000)
    by_purpose = {
        p: {t.episode_id for t in traces if t.purpose is p} for p in (Purpose.TRAIN, Purpose.GATE, Purpose.TEST)
    }
    assert len(by_purpose[Purpose.TRAIN]) == 2 * 32 * 8
    assert sum(map(len, by_purpose.values())) == len(set().union(*by_purpose.values())) == len(traces)
    tasks = {p: {t.task.task_id for t in traces if t.purpose is p} for p in by_purpose}
    assert not tasks[Purpose.TRAIN] & tasks[Purpose.TEST]
    assert not tasks[Purpose.GATE] & tasks[Purpose.TEST]


@pytest.mark.test
def test_the_registry_holds_the_team_with_everything_to_serve_it_again(undisturbed: Run) -> None:
    version, team = undisturbed.registry.load("small", "candidate")
    assert team.iteration == 2
    assert {group: ref.version for group, ref in team.models.items()} == {"team": 2}
    undisturbed.weights.verify(team.models["team"])
    assert set(team.prompts) == {"solver", "verifier", "refiner", "finalizer"}
    champion, _ = undisturbed.registry.load("small", "champion")
    assert champion <= version


def test_every_iteration_has_an_mlflow_run_that_a_repeated_record_leaves_as_it_is(undisturbed: Run) -> None:
    kept = {k: undisturbed.journal.ref(undisturbed.key(k, "record")) for k in ITERATIONS}
    tracker = undisturbed.tracker
    client, parent = tracker._client, tracker.mlflow_run_id
    for iteration, ref in kept.items():
        assert ref is not None
        shown = client.get_run(ref["mlflow_run_id"]).data
        assert (shown.tags["mlflow.parentRunId"], shown.tags["troupe.iteration"]) == (parent, str(iteration))
        assert shown.metrics["policy_version/team"] == float(shown.tags["troupe.policy_version.team"]) == iteration
    done = troupe(undisturbed, "record", "--run", "small", "--iteration", "2")
    handed = json.loads(done.stdout.splitlines()[-1])
    assert kept[2] is not None and handed == kept[2]
    with undisturbed.journal._connect() as connection:  # as if the record had been lost after MLflow had taken it
        connection.execute(journal.STAGES.delete().where(journal.STAGES.c.stage == "record"))
    for iteration in reversed(ITERATIONS):
        assert record(undisturbed, iteration)["mlflow_run_id"] == kept[iteration]["mlflow_run_id"]
    assert [m.step for m in client.get_metric_history(parent, "reward")] == [*ITERATIONS]
    unfinished = troupe(undisturbed, "record", "--run", "small", "--iteration", "3")
    assert unfinished.returncode == 2
    assert "collect, score, train, sync, evaluate, promote missing" in unfinished.stderr


def test_prometheus_sees_the_loop_the_engines_and_what_the_dashboard_draws(undisturbed: Run, scraper: Scraper) -> None:
    late = {"ray_troupe_accuracy"}  # known seconds before the run ends: maybe after the last scrape
    assert sorted((drawn() | exported()) - late - scraper.names) == []
    (ok,) = scraper.of("ray_troupe_episodes_total", run="small", purpose="train", status="ok")
    assert 256 < ok <= 512
    assert scraper.of("ray_troupe_stages_total", run="small", stage="collect", outcome="done") == [2]
    assert scraper.of("ray_troupe_champion_version", run="small")[0] >= 1
    assert scraper.of("ray_troupe_policy_version", run="small", of="trained") == [2]
    assert scraper.of("ray_troupe_episodes_in_flight", run="small") == [0]


@pytest.mark.test
def test_every_iteration_is_watched(undisturbed: Run) -> None:
    for iteration in ITERATIONS:
        recorded = undisturbed.journal.ref(undisturbed.key(iteration, "record"))
        assert recorded is not None
        told = recorded["watch"]
        assert (told["state"], told["alarms"]) == ("learning", []), "two iterations are too few to judge by"
        names = ("outcome", "entropy", "entropy/solver", "repeat_share", "reward_over_outcome", "input_drift")
        assert {f"iteration/{name}" for name in names} <= set(told["learning"])
        shown = undisturbed.tracker._client.get_run(recorded["mlflow_run_id"]).data
        assert shown.metrics["episode_metrics/entropy"] > 0 and shown.metrics["episode_metrics/turns"] >= 1
        assert shown.tags["troupe.watch"].startswith("learning: 0 figures are usual")


@pytest.mark.test
def test_every_line_of_a_stage_says_which_stage_it_is_of(undisturbed: Run) -> None:
    text = (Path(undisturbed.config.storage.root) / "log.txt").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"at"')]
    ours = [line for line in lines if line["logger"] == "pipelines.stages.steps"]
    assert {(line["run"], line["iteration"], line["stage"]) for line in ours} == {
        ("small", k, stage) for k in ITERATIONS for stage in STAGES
    }
    assert {line["model_group"] for line in ours if line["stage"] == "train"} == {"team"}


def test_a_run_killed_in_train_and_started_again_ends_as_the_undisturbed_one(undisturbed: Run, tmp_path: Path) -> None:
    run, log = Run(config_in(tmp_path)), tmp_path / "log.txt"
    kill_when(start(tmp_path, log), lambda: is_running(run, 1, "train", "team"), log)
    before = rows_of(run)
    finish(start(tmp_path, log), log)
    after = rows_of(run)
    finished = {name for name, row in before.items() if row.status == "done"}
    assert str(run.key(1, "collect")) in finished and {n: after[n] for n in finished} == {
        n: before[n] for n in finished
    }
    assert all(keys(run, iteration) == keys(undisturbed, iteration) for iteration in ITERATIONS)
    assert report_of(run)["versions"] == report_of(undisturbed)["versions"]
    assert distance(run, undisturbed) < 1e-3


def test_a_run_that_keeps_only_what_it_needs_is_killed_goes_on_and_ends_as_the_undisturbed_one(
    undisturbed: Run, tmp_path: Path
) -> None:
    # Nothing is promoted, so that version 1 is no champion when the newest is 2.
    log, settings = tmp_path / "log", ["maintain.weights_limit_gb=0", "maintain.keep_champions=1", "promote.min_gain=2"]
    run = Run(config_in(tmp_path))
    kill_when(start(tmp_path, log, settings=settings), lambda: is_running(run, 2, "train", "team"), log)
    finish(start(tmp_path, log, settings=settings), log)
    assert run.weights.versions("team") == [0, 2], "1 is neither the newest nor a champion"
    assert [version_of_checkpoint(folder) for folder in checkpoint_files(run)] == [2]
    assert distance(run, undisturbed) < 1e-4
    with pytest.raises(ValueError, match=r"version 1 of model group 'team' was removed.*maintain\.keep_versions"):
        export_version(run, "team", 1, tmp_path / "out")


@pytest.mark.needs_program("psql")
def test_a_run_on_postgresql_and_s3_killed_in_collect_and_in_train_ends_as_the_undisturbed_one_on_this_disk(
    undisturbed: Run, postgres_server: Postgres, s3_uri: str, tmp_path: Path
) -> None:
    journal, mlflow = (postgres_server.create(f"small-{name}") for name in ("journal", "mlflow"))
    changes = {"storage.root": s3_uri, "storage.journal": journal, "storage.mlflow": mlflow}
    run, log = Run(load_config(CONFIG, changes)), tmp_path / "log.txt"

    def go() -> subprocess.Popen[bytes]:
        """In eight waves, so that there is a middle of collect to be killed in, on a fast machine too."""
        places = [f"storage.journal={journal}", f"storage.mlflow={mlflow}"]
        return start(s3_uri, log, settings=[*places, "collect.episodes_in_flight=32"])

    def some_episodes() -> bool:
        return is_running(run, 1, "collect") and bool(run.traces.find_traces(run_id="small", iteration=1, limit=1))

    assert len(keys(undisturbed, 1)) == 256  # and the store's client is loaded: its import takes as long as a collect
    kill_when(go(), some_episodes, log)
    kept = {t.episode_id for t in run.traces.find_traces(run_id="small", iteration=1, limit=10_000)}
    warm = rows_of(run)[str(run.key(0, "warmstart"))]
    assert 0 < len(kept) < 256

    kill_when(go(), lambda: is_running(run, 1, "train", "team"), log)
    collected = rows_of(run)[str(run.key(1, "collect"))]

    finish(go(), log)
    rows = rows_of(run)
    assert rows[str(run.key(0, "warmstart"))] == warm
    assert rows[str(run.key(1, "collect"))] == collected
    for iteration in ITERATIONS:
        mine = keys(run, iteration)
        assert len(mine) == len(set(mine)) == 256
        assert mine == keys(undisturbed, iteration)
    assert kept <= set(keys(run, 1))
    assert distance(run, undisturbed) < 1e-3
    same, other = report_of(run), report_of(undisturbed)
    assert same["versions"] == other["versions"]
    low, high = other["after"]["ci95"]
    assert low <= same["after"]["accuracy"] <= high
    assert run.registry.load("small", "candidate")[1].models["team"].uri.startswith(f"{s3_uri}/small/weights/")


def test_the_same_command_after_the_end_changes_nothing(undisturbed: Run, tmp_path: Path) -> None:
    before = rows_of(undisturbed)
    log = tmp_path / "log.txt"
    finish(start(Path(undisturbed.config.storage.root), log), log)
    assert rows_of(undisturbed) == before


@pytest.mark.test
def test_another_config_under_the_same_name_is_refused(undisturbed: Run) -> None:
    root = undisturbed.config.storage.root
    done = subprocess.run(
        [*COMMAND, "--set", f"storage.root={root}", "--set", "seed=4"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 2
    assert "exists with another config (differs in seed" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_stored_can_be_looked_at_and_taken_away(undisturbed: Run, tmp_path: Path) -> None:
    trace = undisturbed.traces.find_traces(run_id="small", iteration=2, purpose=Purpose.TRAIN, limit=1)[0]
    shown = troupe(undisturbed, "show", trace.episode_id[:10], "--run", "small")
    assert trace.task.prompt in shown.stdout
    assert all(agent in shown.stdout for agent in ("solver", "verifier", "refiner", "finalizer"))
    assert "reward" in shown.stdout

    played = undisturbed.traces.find_traces(run_id="small", purpose=Purpose.GATE, limit=1)[0]
    compared = troupe(undisturbed, "diff", played.task.task_id, "0", "2", "--run", "small")
    assert compared.returncode == 0, compared.stderr
    assert "v0" in compared.stdout
    assert "v2" in compared.stdout
    never = troupe(undisturbed, "diff", "no-such-task", "0", "2", "--run", "small")
    assert never.returncode == 2
    assert "was not played by" in never.stderr

    assert "small" in troupe(undisturbed, "runs").stdout

    folder = tmp_path / "exported"
    assert troupe(undisturbed, "export", "team", "2", str(folder), "--run", "small").returncode == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    missing = troupe(undisturbed, "export", "team", "9", str(tmp_path / "other"), "--run", "small")
    assert missing.returncode == 2
    assert "no version 9" in missing.stderr


@pytest.mark.test
def test_lineage_leads_from_a_team_to_its_episodes_and_from_an_episode_to_its_teams(undisturbed: Run) -> None:
    lineage = pytest.importorskip("pipelines.extensions.lineage.lineage")
    version, team = undisturbed.registry.load(undisturbed.team_name, max(
        v.version for v in undisturbed.registry.versions(undisturbed.team_name)))  # fmt: skip
    down = lineage.lineage_of_team(undisturbed, version, team)
    newest = team.models["team"].version
    assert [model["version"] for model in down["models"]["team"]] == list(range(newest, -1, -1))
    assert [of["iteration"] for of in down["iterations"]] == list(range(newest + 1))
    last = down["iterations"][-1]
    assert last["traces"]["num_episodes"] == 256 and last["rewards"]["num_episodes"] == 256
    assert last["sampled_by"] == {"team": newest - 1} and down["team"]["git_commit"]
    pinned = TracesRef(**last["traces"])
    episode = next(undisturbed.traces.read_traces(pinned))
    up = lineage.lineage_of_episode(undisturbed, episode.episode_id)
    assert up["trained"]["team"][0] == newest and version in [of["version"] for of in up["teams"]]
    (gate,) = undisturbed.traces.find_traces(run_id="small", purpose=Purpose.GATE, limit=1)
    assert lineage.lineage_of_episode(undisturbed, gate.episode_id)["trained"] == {}
    with pytest.raises(ValueError, match="no episode 'unknown'"):
        lineage.lineage_of_episode(undisturbed, "unknown")
