"""The commands around the gateway, as far as they need no engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servers import free_port
from typer.testing import CliRunner

from pipelines.cli.main import app
from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.run.stored_runs import stored_run
from serve_apps.gateway.traffic.callers import KeyRing, read_keys

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


CONNECTS_FIRST = """
import sys
from types import SimpleNamespace
import pipelines.cluster.connect, pipelines.cli.service as commands
from pipelines.cli.main import app

def connect(address=""):
    print("Ray is", "imported" if "ray" in sys.modules else "not imported", "at", address)
    raise SystemExit

pipelines.cluster.connect.connect = pipelines.cluster.connect.connect_for_good = connect
commands._team = lambda *about: (None, 1, None)
commands.existing_run = lambda *about: SimpleNamespace(team_name="", registry=SimpleNamespace(load=lambda *about: None))
app(sys.argv[1:])
"""


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_a_key_is_shown_once_kept_as_a_hash_and_revoked_by_name(tmp_path: Path) -> None:
    file = tmp_path / "secrets" / "keys.json"
    code, secret = run("key", "web", "--file", str(file), "--scope", "call", "--scope", "feedback", "--days", "1")
    assert code == 0 and secret.startswith("troupe-") and secret.strip() not in file.read_text()
    (kept,) = read_keys(file)
    assert (kept.name, kept.scopes) == ("web", ("call", "feedback"))
    assert kept.expires_at is not None and 86_000 < kept.expires_at - time.time() < 86_401
    assert KeyRing(file).find(f"Bearer {secret.strip()}").name == "web"
    code, said = run("key", "web", "--file", str(file))
    assert code == 2 and "has a key 'web' already" in said
    assert run("key", "web", "--file", str(file), "--revoke") == (0, "revoked web\n")
    assert json.loads(file.read_text()) == []
    code, said = run("key", "web", "--file", str(file), "--revoke", "--scope", "call")
    assert code == 2 and "--scope has no effect on a key that --revoke removes" in said
    code, said = run("key", "web", "--file", str(file), "--revoke")
    assert code == 2 and "has no key 'web'; it has none" in said


def test_what_is_no_scope_no_key_file_or_no_team_is_told(tmp_path: Path) -> None:
    code, said = run("key", "web", "--file", str(tmp_path / "k.json"), "--scope", "root")
    assert code == 2 and "--scope root: scopes are call, feedback, metrics, admin" in said
    (tmp_path / "k.json").write_text('[{"name": "web"}]')
    code, said = run("key", "other", "--file", str(tmp_path / "k.json"))
    assert code == 2 and "gateway.keys_file" in said and "0.sha256" in said
    code, said = run("serve", "demo", "--root", str(tmp_path))
    assert code == 2 and "'demo' is not of the form TEAM@ALIAS" in said


def test_a_run_config_in_a_folder_with_an_at_sign_is_served_and_its_canary_ended(tmp_path: Path) -> None:
    file = tmp_path / "me@site" / "run.yaml"
    file.parent.mkdir()
    file.write_text(f"extends: {SMALL}\nstorage: {{root: {tmp_path}}}\n")
    code, said = run("canary", str(file), "--end")
    assert code == 2 and "run 'small' has not been started" in said
    code, said = run("serve", str(file))
    assert code == 2 and "can be served only on a Ray cluster that outlives this command" in said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("canary small@candidate --auto --share 0.1", "--share is not for --auto, which takes the shares in"),
        ("canary small@candidate --auto --salt a", "--salt is not for --auto"),
        ("canary small@candidate --exit-code", "--exit-code needs --auto"),
        ("canary small --end --share 0.5", "--share has no effect on a canary that --end ends: drop --share"),
        ("canary small --end --auto", "--auto has no effect"),
        ("shadow small --end --share 1", "--share has no effect on shadow traffic"),
        ("serve small@champion --exit-code", "--exit-code needs --guard"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(tmp_path: Path, command: str, said: str) -> None:
    code, output = run(*command.split(), "--root", str(tmp_path))
    assert code == 2 and said in " ".join(output.split())


@pytest.mark.parametrize(
    "command", [("serve", "small@champion"), ("promote", "--run", "small", "--team-version", "2", "--reason", "test")]
)
def test_a_registry_that_is_down_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    url = f"http://127.0.0.1:{free_port()}"
    Run(load_config(SMALL, {"storage.root": str(tmp_path), "storage.mlflow": url})).begin()
    code, said = run(*command, "--root", str(tmp_path))
    assert code == 75 and f"MLflow at {url} (storage.mlflow) does not answer" in said
    assert "teams behind the gateway go on answering" in said and "infrastructure lost, repeat" in said


def test_a_file_says_anew_who_answers_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    url = f"http://127.0.0.1:{free_port()}"
    Run(load_config(SMALL, {"storage.root": str(tmp_path), "storage.mlflow": url})).begin()
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: {SMALL}\nstorage: {{root: {tmp_path}, mlflow: '{url}'}}\ngateway: {{port: 8123}}\n")
    assert run("serve", f"{file}@champion")[0] == 75, "as far as the registry, which is down"
    assert stored_run("small", str(tmp_path)).config.gateway.port == 8123
    file.write_text(f"{file.read_text()}seed: 4\n")
    code, said = run("serve", f"{file}@champion")
    assert code == 2 and "exists with another config (differs in seed)" in " ".join(said.split())


@pytest.mark.parametrize(
    "command",
    [
        "serve small@champion",
        "canary small@champion",
        "canary small --end",
        "shadow small@champion",
        "promote --run small --team-version 2 --reason test",
        "rollback --run small --reason test",
    ],
)
def test_a_command_connects_before_it_imports_ray_which_fixes_how_a_token_is_shown(command: str) -> None:
    arguments = [*command.split(), "--address", "127.0.0.1:6399"]
    done = subprocess.run(
        [sys.executable, "-c", CONNECTS_FIRST, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "Ray is not imported at 127.0.0.1:6399\n", done.stderr[-2000:]
