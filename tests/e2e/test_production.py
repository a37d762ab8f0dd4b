"""A trained team in service: put behind the gateway, switched, refused, and loaded from MLflow by a fresh process."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from servers import free_port
from transformers import AutoModelForCausalLM

from pipelines.production import canary, end_canary, in_service, put_into_service
from pipelines.promote import champion_version
from pipelines.run import Run
from pipelines.sections import TrafficConfig, TrafficGuardsConfig
from pipelines.service import promote_version, watch
from pipelines.serving import app_names
from pipelines.traffic import guard, roll_out
from serve_apps.config import GatewayConfig
from serve_apps.deployment import remove_apps
from serve_apps.gateway_routes import app_name, gateway_statuses
from stores.manifest import Probe
from stores.registry import Team
from stores.weights import WeightStore

PREDICT = """
import json, sys
import mlflow, pandas as pd
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/small@champion")
print(json.dumps(model.predict(pd.DataFrame({"prompt": ["Compute 2+3*4", "Compute 5+1*2"], "seed": [1, 2]})).to_dict("records")))
"""


@pytest.fixture(scope="module")
def run(undisturbed: Run, ray_local: None) -> Iterator[Run]:
    """The trained run, with a gateway on a port of its own."""
    run = Run(undisturbed.config.model_copy(update={"gateway": GatewayConfig(port=free_port())}))
    yield run
    sets = [app for kind in ("blue", "green") for app in app_names(run, kind).values()]
    remove_apps([*sets, app_name(run.config.gateway)])


def serve(run: Run, which: int | str) -> tuple[dict, float]:
    version, team = run.registry.load(run.team_name, which)
    began = time.perf_counter()
    return put_into_service(run, version, team), time.perf_counter() - began


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
    first, _ = serve(run, 1)
    assert (first["set_name"], first["before"], ask(run)) == ("blue", None, "small@1")
    other = max(v.version for v in run.registry.versions(run.team_name))
    assert other != 1 and champion
    second, _ = serve(run, other)
    assert (second["set_name"], second["before"], ask(run)) == ("green", 1, f"small@{other}")
    assert all(proof["verdict"] in ("proven", "indistinguishable") for proof in second["proofs"])
    back, seconds = serve(run, 1)
    assert (back["set_name"], ask(run)) == ("blue", "small@1")
    assert seconds < 5, "the team before is loaded still: the way back is a proof and a route"
    print(f"first {first['load_s']:.1f} s, second {second['load_s']:.1f} s, back {seconds:.2f} s")


def test_a_champion_that_silently_degrades_raises_an_alarm(run: Run) -> None:
    """Nothing was promoted, no weight has changed: somebody shortened what agents may say."""
    usual = watch(run, "champion", ["test"])
    assert usual["state"] == "learning" and "test/success" in usual["learning"] and usual["alarms"] == []
    agents = {name: settings.model_copy(update={"max_tokens": 5}) for name, settings in run.config.agents.items()}
    short = watch(Run(run.config.model_copy(update={"agents": agents})), "champion", ["test"])
    assert short["state"] == "alarm", short
    found = {alarm["figure"] for alarm in short["alarms"]}
    assert {"completion_tokens", "cut_turns", "format_faults"} <= found, found
    tags = run.registry._client.get_model_version(run.team_name, str(short["team_version"])).tags
    assert {f"troupe.alarm.test.{figure}" for figure in found} == {t for t in tags if t.startswith("troupe.alarm.")}
    assert "Watch" in (Path(run.folder) / "report.html").read_text()
    again = watch(run, "champion", ["test"])
    assert again["state"] == "sound", again


def test_a_canary_answers_its_share_and_ends(run: Run) -> None:
    serve(run, 1)
    other = max(v.version for v in run.registry.versions(run.team_name))
    _, team = run.registry.load(run.team_name, other)
    assert canary(run, other, team, share=0.5)["beside"] == 1
    assert sorted(ask(run) for _ in range(4)) == ["small@1"] * 2 + [f"small@{other}"] * 2
    began = time.perf_counter()
    canary(run, other, team, share=1.0)
    assert time.perf_counter() - began < 5, "another share is a change of the route"
    assert ask(run) == f"small@{other}"
    assert end_canary(run) == {"team_version": 1, "ended": other}
    assert {ask(run) for _ in range(3)} == {"small@1"}
    with pytest.raises(ValueError, match="team version 1 of 'small' is in service itself"):
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
    found = in_service(run)
    assert found is not None and found.champion.team_version == 1 and ask(run) == "small@1"


def test_a_promotion_and_a_rollback_by_hand_switch_the_gateway_with_the_champion(run: Run) -> None:
    serve(run, "champion")
    before = champion_version(run)
    other = next(v.version for v in run.registry.versions(run.team_name) if v.version != before)
    moved = promote_version(run, other, reason="a test")
    assert moved["before"] == before and moved["in_service"]["team_version"] == other
    assert ask(run) == f"small@{other}" and run.registry.alias(run.team_name, "champion") == other
    assert serve(run, "previous")[0]["team_version"] == before and ask(run) == f"small@{before}"
    back = promote_version(run, before, reason="a test")
    assert back["in_service"]["switch_s"] < 5 and ask(run) == f"small@{before}"
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


@contextmanager
def asked_all_the_time(run: Run) -> Iterator[list[str]]:
    """Two callers who run the whole workflow again and again; which team answered, and nothing but answers."""
    stop, answered = threading.Event(), []
    url = f"http://127.0.0.1:{run.config.gateway.port}/v1/workflows/{run.team_name}/runs"

    def call() -> None:
        with httpx.Client(timeout=60) as http:
            while not stop.is_set():
                answer = http.post(url, json={"prompt": "2+3*4"})
                answered.append(answer.headers["x-troupe-team"] if answer.status_code == 200 else answer.text)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        yield answered
    finally:
        stop.set()
        for caller in callers:
            caller.join()


def degraded(run: Run, team: Team, folder: Path) -> Team:
    """The team with as much noise on its weights as there is signal: it talks nonsense until it is cut short."""
    models = {}
    for group, ref in team.models.items():
        at = folder / group
        shutil.copytree(ref.uri.removeprefix("file://"), at)
        tensors = load_file(at / "model.safetensors")
        generator = torch.Generator().manual_seed(0)
        noisy = {name: t + t.std() * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
        save_file(noisy, at / "model.safetensors", metadata={"format": "pt"})
        tokens = [list(range(3, 35))]
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)(torch.tensor(tokens)).logits[0]
        logprobs = [float(logits.log_softmax(-1)[i, t]) for i, t in enumerate(tokens[0][1:])]
        probe = Probe(sequences=(tuple(tokens[0]),), logprobs=(tuple(logprobs),))
        models[group] = WeightStore(str(folder / "weights")).commit(
            at, model_group=group, version=90, parent=None, run_id="degraded", iteration=1, probe=probe
        )
    return dataclasses.replace(team, models=models)


def with_traffic(run: Run) -> Run:
    """Decides on few answers: only what is far off shows in them."""
    guards = TrafficGuardsConfig(cut_share=0.3, empty_share=0.4, format_share=0.4, failure_share=0.3, seconds=None)
    traffic = TrafficConfig(shares=(0.3, 0.6), answers_per_step=30, step_timeout_s=120, poll_s=0.2, guards=guards)
    return Run(run.config.model_copy(update={"traffic": traffic}))


def test_a_degraded_team_is_sent_back_as_a_canary_and_when_it_was_forced_in(run: Run, tmp_path: Path) -> None:
    run = with_traffic(run)
    serve(run, 1)
    _, team = run.registry.load(run.team_name, 1)
    bad = degraded(run, team, tmp_path)
    with asked_all_the_time(run) as answered:
        found = roll_out(run, 90, bad)
        assert (found["verdict"], found["share"]) == ("sent_back", 0.3), found
        assert "at most" in found["reason"] or "at least" in found["reason"]
        put_into_service(run, 90, bad)
        forced = guard(run, seconds=120)
        assert (forced["verdict"], forced["team_version"], forced["ended"]) == ("sent_back", 1, 90), forced
        began = time.perf_counter()
        while answered[-1] != "small@1":
            time.sleep(0.02)
        assert time.perf_counter() - began < 5
    assert set(answered) == {"small@1", "small@90"}, "not one request failed"
    events = run.journal.value(run.run_id, "traffic")
    assert events and [e["verdict"] for e in events["events"] if "verdict" in e][-2:] == ["sent_back", "sent_back"]
    with pytest.raises(ValueError, match="the one before it is not loaded any more"):
        guard(run, seconds=1)


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
    in_place = in_service(run)
    assert in_place and in_place.candidate and in_place.share == 0.3
    end_canary(run)


@pytest.mark.parametrize("through", ["the gateway", "this process"])
def test_the_champion_answers_as_an_mlflow_model_in_a_fresh_process(run: Run, through: str) -> None:
    serve(run, "champion")
    url = f"http://127.0.0.1:{run.config.gateway.port}/v1" if through == "the gateway" else ""
    environment = {**os.environ, "TROUPE_GATEWAY_URL": url, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", PREDICT, run.registry.tracking_uri],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == 2 and all(a["num_turns"] >= 2 and a["status"] in ("ok", "truncated") for a in answers)
    champion = run.registry.alias(run.team_name, "champion")
    assert {a["team_version"] for a in answers} == ({str(champion)} if url else {""})
