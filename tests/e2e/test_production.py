"""A trained team in service: put behind the gateway, switched, refused, and loaded from MLflow by a fresh process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from servers import free_port

from pipelines.production import canary, end_canary, in_service, put_into_service
from pipelines.promote import champion_version
from pipelines.run import Run
from pipelines.service import promote_version
from pipelines.serving import app_names
from serve_apps.config import GatewayConfig
from serve_apps.deployment import remove_apps
from serve_apps.gateway_routes import app_name

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
    back = promote_version(run, before, reason="a test")
    assert back["in_service"]["switch_s"] < 5 and ask(run) == f"small@{before}"
    assert run.registry.alias(run.team_name, "champion") == before


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
