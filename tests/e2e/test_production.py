"""A trained team in service: put behind the gateway, switched, refused, and loaded from MLflow by a fresh process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from servers import free_port

from pipelines.config.sections import FromServiceConfig, TrafficConfig, TrafficGuardsConfig
from pipelines.extensions.watch.champion import watch
from pipelines.release.by_hand import promote_version
from pipelines.release.production import canary, deploy_team, deployed_route, end_canary
from pipelines.release.traffic import guard_deployed, roll_out
from pipelines.run.champions import champion_version
from pipelines.run.run import Run
from pipelines.run.serving import app_names
from pipelines.stages.steps import run_stage
from serve_apps.config import CaptureConfig, GatewayConfig
from serve_apps.gateway.routes import gateway_apps, gateway_statuses
from tests.bad_teams import DEGRADED, asked_all_the_time, degraded
from tests.e2e.local_runs import config_in
from tests.serve_apps.deployed_apps import remove_apps

pytestmark = pytest.mark.nightly

PREDICT = """
import json, os, sys
import mlflow, pandas as pd
mlflow.set_tracking_uri(sys.argv[1])
tasks = pd.DataFrame({"prompt": ["Compute 2+3*4", "Compute 5+1*2"], "seed": [1, 2]})
answers = []
for os.environ["TROUPE_GATEWAY_URL"] in sys.argv[2:]:
    answers.append(mlflow.pyfunc.load_model("models:/small@champion").predict(tasks).to_dict("records"))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def run(undisturbed: Run, ray_local: None) -> Iterator[Run]:
    """The trained run, with a gateway on a port of its own."""
    run = Run(undisturbed.config.model_copy(update={"gateway": GatewayConfig(port=free_port())}))
    yield run
    sets = [app for kind in ("blue", "green") for app in app_names(run, kind).values()]
    remove_apps([*sets, *gateway_apps(run.config.gateway)])


def serve(run: Run, which: int | str) -> dict:
    version, team = run.registry.load(run.team_name, which)
    return deploy_team(run, version, team)


def pids(put: Mapping[str, Any]) -> list[int]:
    """Whose engines proved the team's weights. Seconds are for `make bench`: other tests run beside these."""
    return sorted(proof["pid"] for proof in put["proofs"])


def ask(run: Run) -> str:
    url = f"http://127.0.0.1:{run.config.gateway.port}/v1"
    with openai.OpenAI(api_key="none", base_url=url, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="small/solver", messages=[{"role": "user", "content": "Compute 2+3*4"}], seed=1
        )
    assert answer.usage and answer.usage.completion_tokens
    return str(answer.system_fingerprint)


def test_teams_are_loaded_on_the_idle_set_proven_and_switched_whole(run: Run) -> None:
    champion = run.registry.alias(run.team_name, "champion")
    first = serve(run, 1)
    assert (first["set_name"], first["before"], ask(run)) == ("blue", None, "small@1")
    other = max(v.version for v in run.registry.versions(run.team_name))
    assert other != 1 and champion
    second = serve(run, other)
    assert (second["set_name"], second["before"], ask(run)) == ("green", 1, f"small@{other}")
    assert all(proof["verdict"] in ("proven", "indistinguishable") for proof in second["proofs"])
    back = serve(run, 1)
    assert (back["set_name"], ask(run)) == ("blue", "small@1")
    assert pids(back) == pids(first), "the way back starts no engine anew"


def test_a_champion_that_silently_degrades_raises_an_alarm(run: Run) -> None:
    """Nothing was promoted, no weight has changed: somebody shortened what agents may say."""
    usual = watch(run, "champion", ["test"])
    assert usual["state"] == "learning" and "test/outcome" in usual["learning"] and usual["alarms"] == []
    agents = {name: settings.model_copy(update={"max_tokens": 5}) for name, settings in run.config.agents.items()}
    short = watch(Run(run.config.model_copy(update={"agents": agents})), "champion", ["test"])
    assert short["state"] == "alarm", short
    found = {alarm["figure"] for alarm in short["alarms"]}
    assert {"completion_tokens", "cut_share"} <= found, found
    assert {"format_share", "format_share/verifier"} & found, "few turns of so small a team are well-formed as it is"
    tags = run.registry._client.get_model_version(run.team_name, str(short["team_version"])).tags
    assert {f"troupe.alarm.test.{figure}" for figure in found} == {t for t in tags if t.startswith("troupe.alarm.")}
    assert "Watch" in (Path(run.folder) / "report.html").read_text()
    again = watch(run, "champion", ["test"])
    assert again["state"] == "sound", again


def test_a_canary_answers_its_share_and_ends(run: Run) -> None:
    serve(run, 1)
    other = max(v.version for v in run.registry.versions(run.team_name))
    _, team = run.registry.load(run.team_name, other)
    half = canary(run, other, team, share=0.5)
    assert half["beside"] == 1
    assert {ask(run) for _ in range(20)} == {"small@1", f"small@{other}"}, "drawn at random: 1 in 500,000 misses one"
    whole = canary(run, other, team, share=1.0)
    assert pids(whole) == pids(half), "another share starts no engine anew"
    assert ask(run) == f"small@{other}"
    assert end_canary(run) == {"team_version": 1, "ended": other}
    assert {ask(run) for _ in range(3)} == {"small@1"}
    with pytest.raises(ValueError, match="team version 1 of 'small' is deployed itself"):
        canary(run, 1, run.registry.load(run.team_name, 1)[1], share=0.1)


def test_a_team_whose_weights_are_damaged_is_refused_and_the_one_in_service_stays(run: Run, tmp_path: Path) -> None:
    serve(run, 1)
    other = max(v.version for v in run.registry.versions(run.team_name))
    _, team = run.registry.load(run.team_name, other)
    (ref,) = team.models.values()
    file = Path(ref.uri.removeprefix("file://")) / "model.safetensors"
    kept = shutil.copy(file, tmp_path / "kept")
    try:
        file.write_bytes(b"\0" * file.stat().st_size)
        with pytest.raises(ValueError, match=r"sha256|checksum|differ"):
            serve(run, other)
        file.unlink()
        with pytest.raises(ValueError, match=r"missing|gone|no such|does not"):
            serve(run, other)
    finally:
        shutil.copy(kept, file)
    found = deployed_route(run)
    assert found is not None and found.champion.team_version == 1 and ask(run) == "small@1"


def test_a_promotion_and_a_rollback_by_hand_switch_the_gateway_with_the_champion(run: Run) -> None:
    serve(run, "champion")
    before = champion_version(run)
    other = next(v.version for v in run.registry.versions(run.team_name) if v.version != before)
    moved = promote_version(run, other, reason="a test")
    assert moved["before"] == before and moved["deployed"]["team_version"] == other
    assert ask(run) == f"small@{other}" and run.registry.alias(run.team_name, "champion") == other
    assert serve(run, "previous")["team_version"] == before and ask(run) == f"small@{before}"
    back = promote_version(run, before, reason="a test")
    assert back["deployed"]["team_version"] == before and ask(run) == f"small@{before}"
    assert run.registry.alias(run.team_name, "champion") == before


def test_a_gateway_that_is_started_again_answers_while_the_registry_is_gone(run: Run, tmp_path: Path) -> None:
    serve(run, "champion")
    answered, (before,) = ask(run), gateway_statuses(run.config.gateway)
    database = Path(run.registry.tracking_uri.removeprefix("sqlite:///"))
    database.rename(tmp_path / "gone.db")
    try:
        os.kill(before["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while [s["pid"] for s in gateway_statuses(run.config.gateway)] in ([], [before["pid"]]):
            assert time.monotonic() < deadline, "no other replica came up"
            time.sleep(0.2)
        assert ask(run) == answered and not database.exists()
    finally:
        (tmp_path / "gone.db").rename(database)


def with_traffic(run: Run) -> Run:
    """Decides on few answers: only what is far off shows in them."""
    guards = TrafficGuardsConfig(cut_share=0.3, empty_share=0.4, format_share=0.4, failure_share=0.3, latency_s=None)
    traffic = TrafficConfig(shares=(0.3, 0.6), answers_per_step=30, step_timeout_s=120, poll_s=0.2, guards=guards)
    return Run(run.config.model_copy(update={"traffic": traffic}))


def test_a_degraded_team_is_sent_back_as_a_canary_and_when_it_was_forced_in(run: Run, tmp_path: Path) -> None:
    run = with_traffic(run)
    serve(run, 1)
    _, team = run.registry.load(run.team_name, 1)
    bad = degraded(team, tmp_path)
    with asked_all_the_time(run) as answered:
        found = roll_out(run, DEGRADED, bad)
        assert (found["verdict"], found["share"]) == ("sent_back", 0.3), found
        assert "at most" in found["reason"] or "at least" in found["reason"]
        deploy_team(run, DEGRADED, bad)
        forced = guard_deployed(run, seconds=120)
        assert (forced["verdict"], forced["team_version"], forced["ended"]) == ("sent_back", 1, DEGRADED), forced
        while answered[-1] != "small@1":
            time.sleep(0.02)
    assert set(answered) == {"small@1", f"small@{DEGRADED}"}, "not one request failed"
    events = run.journal.value(run.run_id, "traffic")
    assert events and [e["verdict"] for e in events["events"] if "verdict" in e][-2:] == ["sent_back", "sent_back"]
    with pytest.raises(ValueError, match="the one before it is not loaded any more"):
        guard_deployed(run, seconds=1)


def test_a_sound_canary_advances_through_its_shares_and_is_promoted(run: Run) -> None:
    run = with_traffic(run)
    serve(run, "champion")
    champion = champion_version(run)
    other = next(v.version for v in run.registry.versions(run.team_name) if v.version != champion)
    _, team = run.registry.load(run.team_name, other)
    try:
        with asked_all_the_time(run) as answered:
            found = roll_out(run, other, team)
        assert found["verdict"] == "promoted" and [s["state"] for s in found["steps"]] == ["advance"] * 2, found
        assert {a for a in answered} == {f"small@{champion}", f"small@{other}"}
        assert champion_version(run) == other and ask(run) == f"small@{other}"
    finally:
        promote_version(run, champion, reason="a test")


def test_a_canary_that_nobody_asks_stays_undecided(run: Run) -> None:
    run = with_traffic(run)
    traffic = run.config.traffic.model_copy(update={"step_timeout_s": 1.0})
    run = Run(run.config.model_copy(update={"traffic": traffic}))
    serve(run, 1)
    other = max(v.version for v in run.registry.versions(run.team_name))
    found = roll_out(run, other, run.registry.load(run.team_name, other)[1])
    assert (found["verdict"], found["share"], found["reason"]) == ("undecided", 0.3, "after 1 s: 0 answers")
    in_place = deployed_route(run)
    assert in_place and in_place.candidate and in_place.share == 0.3
    end_canary(run)


def test_a_canary_that_somebody_ends_is_not_put_back(run: Run) -> None:
    run = with_traffic(run)
    serve(run, 1)
    other = max(v.version for v in run.registry.versions(run.team_name))
    with ThreadPoolExecutor() as pool:
        found = pool.submit(roll_out, run, other, run.registry.load(run.team_name, other)[1])
        while (now := deployed_route(run)) is None or now.candidate is None:
            assert not found.done(), found.result()
            time.sleep(0.05)
        end_canary(run)
        told = found.result(timeout=60)
    assert (told["verdict"], told["reason"]) == ("undecided", "somebody else has ended this canary")
    now = deployed_route(run)
    assert now is not None and now.candidate is None


def test_the_champion_answers_as_an_mlflow_model_in_a_fresh_process(run: Run) -> None:
    """Through the gateway's address, through its base_url, and on engines of its own where no address is given."""
    serve(run, "champion")
    gateway = f"http://127.0.0.1:{run.config.gateway.port}"
    urls = [gateway, f"{gateway}/v1", ""]
    done = subprocess.run(
        [sys.executable, "-c", PREDICT, run.registry.tracking_uri, *urls],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    champion = run.registry.alias(run.team_name, "champion")
    for url, answers in zip(urls, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert len(answers) == 2 and all(a["num_turns"] >= 2 and a["status"] in ("ok", "truncated") for a in answers)
        assert {a["team_version"] for a in answers} == ({str(champion)} if url else {""})


def test_what_callers_said_of_answers_is_trained_on(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.config.storage.root, tmp_path / "copy")  # others read this run after us
    own = config_in(tmp_path / "copy")
    gateway = GatewayConfig(port=free_port(), capture=CaptureConfig(share=1.0, flush_s=0.1))
    collect = own.collect.model_copy(
        update={"from_service": FromServiceConfig(max_episodes=12), "tasks_per_iteration": 8}
    )
    own = own.model_copy(update={"gateway": gateway, "collect": collect, "iterations": 3})
    learner = Run(own)
    try:
        serve(learner, "champion")
        with httpx.Client(base_url=f"http://127.0.0.1:{gateway.port}/v1", timeout=60) as http:
            for number in range(12):
                body = {"prompt": f"{number}+2*3", "store": True}
                answer = http.post("/workflows/small/runs", json=body).raise_for_status().json()
                said = {"score": 1.0 if number % 2 else -1.0}
                http.post(f"/traces/{answer['id']}/feedback", json=said).raise_for_status()
        run_stage(learner, "collect", 3)
        assert learner.iteration(3).collected.served == {"taken": 12, "held_out": 0, "left": 0}
        run_stage(learner, "score", 3)
        run_stage(learner, "train", 3, model_group="team")
        metrics = learner.iteration(3).trained["team"].metrics
        assert metrics["train/served_rows"] > 0 and metrics["train/served_rows_kept"] > 0, metrics
        assert metrics["train/logprob_gap_max"] < 1e-3, "the fresh ones still prove that engine and trainer agree"
    finally:
        remove_apps(gateway_apps(gateway))
