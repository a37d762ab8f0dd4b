"""The services of infra/compose as it starts them, without containers: their commands and variables, on this machine's
PostgreSQL and S3 server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import yaml
from servers import S3, Postgres, free_port

from stores.extensions import hooks
from stores.files import list_files, write_file
from stores.registry.registry import CHAMPION, TeamRegistry
from stores.registry.team import Team
from stores.registry.tracking import RunTracker
from stores.types import ModelVersionRef

ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "infra" / "compose" / "compose.yaml").read_text())["services"]
BIN = Path(sys.executable).parent
SECRET = r"\1-here"
"""What `.env` says for a variable, in these tests."""
pytestmark = [pytest.mark.nightly, pytest.mark.needs_program("psql")]


def environment(service: str, postgres: Postgres, s3: S3, **changes: str) -> dict[str, str]:
    """A service's own variables, with the places and secrets of this machine instead of the containers'."""
    given = {
        name: re.sub(r"\$\{(\w+).*\}", SECRET, str(value)) for name, value in SERVICES[service]["environment"].items()
    }
    here = {"PGHOST": "127.0.0.1", "PGPORT": str(postgres.port), **s3.environment}
    base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**base, "PATH": f"{BIN}:{base['PATH']}", **given, **here, **changes}


@pytest.fixture(scope="module")
def databases(postgres_server: Postgres, s3_server: S3) -> None:
    """Those that the compose file's PostgreSQL has, made by its script; its superuser is called `troupe` here, as is the journal's."""
    script = (ROOT / "infra" / "compose" / "databases.sh").read_text()
    assert script.count('make troupe "$TROUPE_PGPASSWORD"') == 1
    rest = re.sub(r"make troupe .*\n", "", script)
    given = environment("postgres", postgres_server, s3_server, **postgres_server.environment, POSTGRES_USER="troupe")
    done = subprocess.run(["bash", "-c", rest], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_service_uses_its_own_database_and_no_other(databases: None, postgres_server: Postgres) -> None:
    place = f"127.0.0.1:{postgres_server.port}"
    with psycopg.connect(f"postgresql://mlflow:MLFLOW_PGPASSWORD-here@{place}/mlflow") as connection:
        assert connection.execute("SELECT current_user").fetchone() == ("mlflow",)
    with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
        psycopg.connect(f"postgresql://airflow:AIRFLOW_PGPASSWORD-here@{place}/mlflow")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(f"postgresql://mlflow:AIRFLOW_PGPASSWORD-here@{place}/mlflow")


@pytest.fixture(scope="module")
def mlflow(
    databases: None, postgres_server: Postgres, s3_server: S3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Address of MLflow's server, started as the compose file does, with one worker: uvicorn ends children that are slow to begin."""
    port, log = free_port(), tmp_path_factory.mktemp("mlflow-server") / "log"
    given = SERVICES["mlflow"]["command"]
    command = [part.replace("5000", str(port)).replace("--workers=2", "--workers=1") for part in given]
    login = str(ROOT / "infra" / "compose" / "basic_auth.ini")
    env = environment("mlflow", postgres_server, s3_server, MLFLOW_AUTH_CONFIG_PATH=login, HOME=str(log.parent))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [BIN / command[0], *command[1:]], env=env, cwd=log.parent, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 300
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def test_a_team_and_a_run_are_kept_through_mlflows_server(
    mlflow: str, postgres_server: Postgres, s3_server: S3, make_trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = environment("ray-head", postgres_server, s3_server)
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, client[name])
    root = f"{s3_server.uri}/{uuid4().hex[:8]}/mlflow-artifacts"
    registry = TeamRegistry(mlflow, root)
    models = {"team": ModelVersionRef(model_group="team", version=1, uri="s3://b/team/v1", manifest_sha256="ab" * 32)}
    team = Team(
        workflow="package.module:Flow",
        prompts={"solver": "Solve {question} ✓"},
        credit={"path": "package.credit:Rule", "settings": {}, "version": "c1"},
        models=models,
        git_commit="0123abc",
        run_id="served",
        iteration=1,
        evaluation={"accuracy": 0.5},
    )
    version = registry.register("served", team)
    registry.set_alias("served", CHAMPION, version)
    assert TeamRegistry(mlflow, root).load("served", CHAMPION) == (version, team)
    assert registry.register("served", team) == version

    tracker = RunTracker(mlflow, root, "served")
    tracker.start({"seed": 1})
    tracker.log_metrics({"train/kl": 0.5}, 1)
    place = f"{s3_server.uri}/{uuid4().hex[:8]}/report.json"
    write_file(place, b"{}")
    tracker.log_file(place)
    for show in hooks("episodes").values():
        assert show(tracker, tracker.mlflow_run_id, [(make_trace(0, run_id="served"), None)]) == 1
    assert tracker._client.get_run(tracker.mlflow_run_id).data.metrics == {"train/kl": 0.5, "team/accuracy": 0.5}
    names = {file.name.rpartition("/")[2] for file in list_files(root)}
    assert {"report.json", "team.json"} <= names, "artifacts go to S3 by themselves, not through the server"


def test_nobody_moves_the_champion_without_a_login(mlflow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "troupe")
    for password in ("", "guessed"):
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)
        with pytest.raises(Exception, match=r"401|not authenticated|Unauthorized"):
            TeamRegistry(mlflow, "file:///nowhere").set_alias("served", CHAMPION, 1)
    request = urllib.request.Request(f"{mlflow}/api/2.0/mlflow/registered-models/alias", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30)
    assert refused.value.code == 401


def test_airflow_keeps_its_tables_in_postgresql_and_the_dag_of_the_cluster(
    databases: None, postgres_server: Postgres, s3_server: S3, tmp_path: Path
) -> None:
    dags = {
        "AIRFLOW__CORE__DAGS_FOLDER": f"{ROOT}/dags",
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    dags |= {"TROUPE_RUN_CONFIGS": f"{ROOT}/infra/cluster/*.yaml", "PYTHONPATH": str(ROOT)}
    fernet = {"AIRFLOW__CORE__FERNET_KEY": "Zm9vYmFyYmF6cXV4Zm9vYmFyYmF6cXV4Zm9vYmFyYmE="}
    env = environment("airflow-scheduler", postgres_server, s3_server, **dags, **fernet)

    def airflow(*arguments: str) -> None:
        done = subprocess.run(
            [BIN / "airflow", *arguments],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    migrate = SERVICES["airflow-migrate"]["command"]
    airflow(*migrate[1:])
    airflow("dags", "reserialize")
    with psycopg.connect(
        f"postgresql://airflow:AIRFLOW_PGPASSWORD-here@127.0.0.1:{postgres_server.port}/airflow"
    ) as connection:
        stored = {name for (name,) in connection.execute("SELECT dag_id FROM serialized_dag")}
    assert "train_team__nightly" in stored
    assert not list(tmp_path.glob("*.db")), "SQLite was used"
