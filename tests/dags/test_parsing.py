"""Airflow parses the DAGs fast and without anything heavy, shows what is wrong with a config, and hides no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.test

ROOT = Path(__file__).parents[2]
LOCAL = ROOT / "infra" / "airflow.sh"
SMALL = ROOT / "tests" / "e2e" / "small.yaml"
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "lancedb", "mlflow", "pyarrow", "numpy", "sqlalchemy.orm")
FAMILIES = ("train_team", "evaluate_team", "promote_team", "rollback_team", "roll_out_team", "maintain_stores")

PROBE = """
import json, sys, time
began = time.process_time()
import airflow.sdk, airflow.triggers.base
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.providers.standard.operators.branch import BaseBranchOperator
from airflow.sdk import task; task.branch
base = set(sys.modules)
airflow_s = time.process_time() - began
from airflow.dag_processing.dagbag import DagBag
base |= set(sys.modules)
began = time.process_time()  # of this process: the machine may be busy with other tests
bag = DagBag(sys.argv[1])
seconds = time.process_time() - began
heavy = sorted({name.split(".")[0] for name in set(sys.modules) - base} & set(sys.argv[2:]))
from airflow.timetables.base import TimeRestriction
from airflow.timetables.trigger import CronTriggerTimetable
def first_run_s(dag):  # seconds from now to the first DAG run of one that Airflow has never seen
    if type(dag.timetable).__name__ != "CronTriggerTimetable":
        return None
    shown = dag.timetable
    times = CronTriggerTimetable(shown.expression, timezone=shown.timezone, run_immediately=shown.run_immediately)
    restriction = TimeRestriction(dag.start_date, None, dag.catchup)
    return times.next_dagrun_info(last_automated_data_interval=None, restriction=restriction).run_after.timestamp() - time.time()
dags = {name: {"schedule": getattr(dag.timetable, "expression", type(dag.timetable).__name__), "tasks": sorted(dag.task_ids), "params": sorted(dag.params),
               "pools": {task.task_id: [task.pool, task.priority_weight] for task in dag.tasks if task.pool != "default_pool"},
               "first_run_s": first_run_s(dag), "max_active_runs": dag.max_active_runs, "catchup": dag.catchup} for name, dag in bag.dags.items()}
print(json.dumps({"airflow_s": airflow_s, "seconds": seconds, "heavy": heavy, "dags": dags,
                  "errors": {k.rsplit("/", 1)[1]: v for k, v in bag.import_errors.items()}}))
"""


def run_airflow(home: Path, code: str, *arguments: str, python: str = sys.executable, **variables: str) -> str:
    """The last line that `code` prints in a process with an Airflow of its own."""
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},  # which may lead to this checkout
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        **variables,
    }
    done = subprocess.run(
        [python, "-c", code, *arguments],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


def parse(home: Path, configs: str, python: str = sys.executable) -> dict[str, Any]:
    """What Airflow finds in the DAG folder."""
    said = run_airflow(home, PROBE, str(ROOT / "dags"), *HEAVY, python=python, TROUPE_RUN_CONFIGS=configs)
    return dict(json.loads(said))


def write(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(yaml.safe_load(SMALL.read_text()) | changes))
    return path


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two valid scheduled configs, one without a schedule, and one of every way to be wrong."""
    home = tmp_path_factory.mktemp("home")
    berlin = {"cron": "0 2 * * 1-5", "timezone": "Europe/Berlin", "evaluate": "@daily", "maintain": ""}
    write(home / "small.yaml", schedule=berlin)
    canary = {"deploy": "canary"}
    follows = {"schedule": {"on_assets": ["troupe://team/small"]}, "promote": canary, "watch": {"on_alarm": "fail"}}
    write(home / "watcher.yaml", run="watcher", **follows)
    write(home / "by_hand.yaml", run="by_hand")
    pools = {"cron": "@hourly", "jobs": "stage", "engine_pool": "engines", "trainer_pool": "trainers"}
    write(home / "overlapping.yaml", run="overlapping", schedule=pools, loop={"max_lag": 2})
    write(home / "misspelt.yaml", run="misspelt", schedul={"cron": "@daily"})
    write(home / "cron.yaml", run="cron", schedule={"cron": "99 * * * *"})
    write(home / "twice.yaml", schedule={"cron": "@daily"})
    write(home / "reserved.yaml", run="reserved", schedule={"on_assets": ["airflow://team/small"]})
    (home / "no_yaml.yaml").write_text("run: [")
    (home / "no_day.yaml").write_text("schedule: {start: 2026-02-30}")
    return parse(home, f"{home}/*.yaml:{home}/missing.yml:{home}/typo/*.yaml")


def test_parsing_imports_nothing_heavy(parsed: dict[str, Any]) -> None:
    print(f"Airflow's own import {parsed['airflow_s']:.2f} s, all DAG files {parsed['seconds']:.2f} s")
    assert parsed["heavy"] == []


def test_every_valid_config_with_a_schedule_is_a_family_of_dags(parsed: dict[str, Any]) -> None:
    assert set(parsed["dags"]) == {
        f"{family}__{run}" for family in FAMILIES for run in ("small", "watcher", "overlapping")
    }
    train = parsed["dags"]["train_team__small"]
    assert train["tasks"] == sorted(
        [
            "begin",
            "warm",
            "collect",
            "score",
            "train",
            "sync",
            "evaluate",
            "gate",
            "promote",
            "report",
            "record",
            "in_service",
            "end",
        ]
    )
    assert (train["max_active_runs"], train["catchup"], train["schedule"]) == (1, False, "0 2 * * 1-5")
    watcher = parsed["dags"]["train_team__watcher"]
    assert watcher["schedule"] == "AssetTriggeredTimetable"
    assert set(watcher["tasks"]) - set(train["tasks"]) == {"watched", "alarm"}
    assert parsed["dags"]["promote_team__small"]["params"] == ["reason", "team_version"]
    assert parsed["dags"]["promote_team__small"]["tasks"] == ["approve", "promote"]
    assert parsed["dags"]["evaluate_team__small"]["tasks"] == ["alarm", "learning", "sound", "state", "watch"]
    roll_out = parsed["dags"]["roll_out_team__small"]["tasks"]
    assert roll_out == ["canary", "promoted", "sent_back", "undecided", "verdict"]


def test_a_new_dag_waits_for_its_time_and_makes_up_for_none_before(parsed: dict[str, Any]) -> None:
    first = {name: dag["first_run_s"] for name, dag in parsed["dags"].items()}
    for name in ("train_team__small", "evaluate_team__small", "maintain_stores__watcher", "train_team__overlapping"):
        assert first[name] > -300 - 60, "five minutes late, and the minute that parsing may take"
    assert first["promote_team__small"] is None


def test_iterations_that_overlap_are_dag_runs_at_once_and_their_stages_take_slots_of_pools(
    parsed: dict[str, Any],
) -> None:
    train = parsed["dags"]["train_team__overlapping"]
    assert train["max_active_runs"] == 3
    assert train["pools"] == {
        "collect": ["engines", 2],
        "sync": ["engines", 1],
        "evaluate": ["engines", 3],
        "train": ["trainers", 1],
    }
    assert parsed["dags"]["evaluate_team__overlapping"]["max_active_runs"] == 1
    assert parsed["dags"]["train_team__small"]["pools"] == {}


def test_every_invalid_config_is_named_with_key_and_fix_and_nothing_else_fails(parsed: dict[str, Any]) -> None:
    assert list(parsed["errors"]) == ["invalid_runs.py"]
    said = parsed["errors"]["invalid_runs.py"]
    assert "misspelt.yaml: unknown key 'schedul': did you mean 'schedule'?" in said
    assert "cron.yaml: schedule.cron: '99 * * * *' is no time of cron" in said
    assert "twice.yaml: run 'small' is that of" in said
    assert "no_yaml.yaml is not YAML" in said
    assert "no_day.yaml: schedule.start: Input should be a valid date" in said and "(got '2026-02-30')" in said
    assert "reserved.yaml: schedule.on_assets: 'airflow://team/small': " in said
    assert "missing.yml does not exist" in said
    assert "TROUPE_RUN_CONFIGS: no file is called" in said


def test_the_shipped_configs_give_no_import_error(tmp_path: Path) -> None:
    found = parse(tmp_path, f"{ROOT}/infra/runs/*.yaml")
    assert found["errors"] == {}


@pytest.mark.nightly
def test_a_writer_of_the_local_airflow_waits_for_another_one(tmp_path: Path) -> None:
    (variable,) = {line.split()[1] for line in LOCAL.read_text().splitlines() if "CONNECT_ARGS=" in line}
    name, _, value = variable.partition("=")
    asked = (
        "from airflow import settings; print(settings.engine.connect().exec_driver_sql('PRAGMA busy_timeout').scalar())"
    )
    assert run_airflow(tmp_path, asked, PYTHONPATH=str(ROOT), **{name: value}) == "60000"


@pytest.mark.nightly
def test_an_airflow_with_the_light_part_only_parses_the_same_dags(tmp_path: Path, parsed: dict[str, Any]) -> None:
    light = tmp_path / "light"
    done = subprocess.run(
        ["infra/setup.sh", "airflow", light], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    python = str(light / "bin" / "python")
    asked = f"from importlib.util import find_spec; print([m for m in {HEAVY[:4]} if find_spec(m)])"
    assert subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip() == "[]"

    write(tmp_path / "small.yaml", schedule={"cron": "0 2 * * *"}, cluster={"folder": "/opt/troupe"})
    write(tmp_path / "placeless.yaml", run="placeless", schedule={"cron": "0 2 * * *"})
    found = parse(tmp_path, f"{tmp_path}/*.yaml", python)
    assert set(found["dags"]) == {name for name in parsed["dags"] if name.endswith("__small")}
    assert "placeless.yaml: cluster.folder is missing" in found["errors"]["invalid_runs.py"]
