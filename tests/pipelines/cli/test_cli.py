"""Bad input on the command line: one clear message, a non-zero exit, no traceback unless --debug, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from pipelines.cli.options import JOBS, LOOK, SERVE, TOOLS, TRAIN

pytestmark = pytest.mark.test

TROUPE = Path(sys.executable).parent / "troupe"
DEMO = Path(__file__).parents[3] / "infra" / "runs" / "demo.yaml"


def troupe(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`troupe ARGUMENTS`, run in `folder`."""
    return subprocess.run([TROUPE, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=120)


def said(folder: Path, *arguments: str | Path) -> str:
    """What a refused command says: one message, and nothing left behind."""
    before = sorted(folder.rglob("*"))
    done = troupe(folder, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("troupe: ")
    assert "Traceback" not in done.stderr
    assert sorted(folder.rglob("*")) == before
    return done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.optimiser.lr=1", "unknown key 'train.optimiser': did you mean 'optimizer'?"),
        ("iterations=many", "iterations: Input should be a valid integer"),
        ("workflow.path=no_such_module:Chain", "workflow.path: cannot import 'no_such_module'"),
        (
            "model_groups.solver_verifier.agents=[solver]",
            "agent 'verifier' of the workflow is mapped to no model group",
        ),
        ("model_groups.more={agents: [planner]}", "'planner' is no agent of the workflow"),
        ("model_groups.solver_verifier.model=nowhere", "drop `model`, or set warmstart.tiny_model: null"),
        ("tasks.train={path: nowhere.jsonl}", "task file nowhere.jsonl does not exist"),
        ("seed", "'seed' is not of the form KEY=VALUE"),
    ],
)
def test_a_bad_config_ends_in_one_message(tmp_path: Path, change: str, message: str) -> None:
    assert message in said(tmp_path, "train", DEMO, "--set", change)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "holds no task"),
        ('{"question": "1+1", "answer": "2"}\n{"question": 1+1}\n', "tasks.jsonl:2: not JSON"),
        ('{"question": "1+1", "answer": "2"}\n[1, 2]\n', "tasks.jsonl:2: a task is a JSON object"),
        ('{"question": "1+1"}\n', "tasks.jsonl:1: task without answer"),
        ('{"answer": "2"}\n', "tasks.jsonl:1: no task prompt"),
    ],
)
def test_a_bad_task_file_is_named_with_its_line(tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(rows)
    assert message in said(tmp_path, "validate", DEMO, "--set", "tasks.train={path: tasks.jsonl}")


def test_missing_and_unreadable_run_configs_are_named(tmp_path: Path) -> None:
    assert "run config nowhere.yaml does not exist" in said(tmp_path, "train", "nowhere.yaml")
    (tmp_path / "run.yaml").write_text("run: [demo")
    assert "run.yaml is not YAML" in said(tmp_path, "validate", "run.yaml")


def test_a_model_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    changes = [f"model_groups.{group}.model=model" for group in ("solver_verifier", "refiner_finalizer")]
    changes.append("warmstart.tiny_model=null")
    assert "has no tokenizer" in said(tmp_path, "validate", DEMO, *(part for c in changes for part in ("--set", c)))


def test_a_team_without_alias_is_named(tmp_path: Path) -> None:
    assert "not of the form TEAM@ALIAS" in said(tmp_path, "evaluate", "demo", "--tasks", "tasks.jsonl")


@pytest.mark.nightly
def test_traces_of_another_run_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    assert "--from-traces 'demo' is not of the form RUN@ITERATION" in said(
        tmp_path, "train", DEMO, "--from-traces", "demo"
    )
    assert "no run 'other' below" in said(tmp_path, "train", DEMO, "--from-traces", "other@1", "--store", tmp_path)
    assert "says where the run of --from-traces is" in said(tmp_path, "train", DEMO, "--store", tmp_path)


@pytest.mark.nightly
def test_the_plan_of_training_on_stored_traces_samples_nothing(tmp_path: Path) -> None:
    done = troupe(tmp_path, "train", DEMO, "--from-traces", "other@1", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("plan: begin -> traces of other@1 -> score -> train solver_verifier")
    assert "--from-traces" in troupe(tmp_path, "train", "--help").stdout


def test_a_second_run_with_the_same_name_and_another_config_is_refused(tmp_path: Path) -> None:
    from pipelines.config.run_config import load_config
    from stores.journal.journal import Journal

    config = load_config(DEMO)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    journal = Journal(f"sqlite:///{tmp_path}/runs/demo/journal.db")
    journal.begin_run("demo", config.sha256, json.dumps(config.model_dump(mode="json")))
    refused = troupe(tmp_path, "stage", "score", "--run", DEMO, "--iteration", "1", "--set", "seed=1")
    assert refused.returncode == 2
    assert "run 'demo' exists with another config" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_help_shows_the_panels_in_the_order_of_the_work_and_begins_with_what_a_newcomer_needs(tmp_path: Path) -> None:
    lines = troupe(tmp_path, "--help").stdout.splitlines()
    titles = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
    assert titles == ["Options", TRAIN, LOOK, SERVE, JOBS, TOOLS]
    first_of_panel = lines[next(i for i, line in enumerate(lines) if line.startswith(f"╭─ {TRAIN} ")) + 1]
    assert first_of_panel.split()[1] == "new"


def test_an_unknown_stage_is_told_which_there_are(tmp_path: Path) -> None:
    refused = troupe(tmp_path, "stage", "colect", "--run", DEMO, "--iteration", "1")
    assert refused.returncode == 2
    assert "unknown stage 'colect': one of collect, score, train, sync, evaluate, promote" in refused.stderr


def test_debug_shows_where_an_error_came_from(tmp_path: Path) -> None:
    shown = troupe(tmp_path, "validate", "nowhere.yaml", "--debug")
    assert shown.returncode == 2, "schedulers decide by it"
    assert "Traceback" in shown.stderr
    assert "run config nowhere.yaml does not exist" in shown.stderr


def test_a_dry_run_prints_config_and_plan_and_writes_nothing(tmp_path: Path) -> None:
    done = troupe(tmp_path, "train", DEMO, "--set", "iterations=3", "--dry-run")
    assert done.returncode == 0, done.stderr
    printed, _, plan = done.stdout.partition("\nplan: ")
    assert yaml.safe_load(printed)["iterations"] == 3
    assert "3 x [collect 384 episodes" in plan
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["stores.py", "pipelines/__init__.py", "serve_apps/__init__.py", "train_loops.py"])
def test_a_module_that_hides_a_package_of_troupe_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    message = said(tmp_path, "validate", DEMO)
    assert f"{tmp_path / file} hides Troupe's own package" in message
    assert "rename it" in message


def test_a_module_that_is_on_the_path_from_the_start_is_named_before_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "stores.py").write_text("raise SystemExit('imported')")
    command = [sys.executable, "-m", "pipelines.cli", "validate", str(DEMO)]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"troupe: {tmp_path / 'stores.py'} hides Troupe's own package 'stores'")


def test_the_module_runs_as_the_command_does(tmp_path: Path) -> None:
    (tmp_path / "dags").mkdir()  # as in many Airflow projects; a folder of files is not imported
    command = [sys.executable, "-m", "pipelines.cli", "validate", str(DEMO)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok (2 model groups, 4 agents)" in done.stdout


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    assert troupe(tmp_path, "--version").stdout == f"{version('troupe-rl')}\n"


def test_a_root_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "--root nowhere: there is no such folder" in said(tmp_path, "runs", "--root", "nowhere")


def test_a_character_that_a_terminal_lacks_is_shown_as_its_escape() -> None:
    shows = "from pipelines.cli.main import main; main(lambda: print('é…\\udc80'))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", shows], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "\\xe9\\u2026\\udc80\n"


@pytest.mark.parametrize("command", ["maintain", "watch"])
def test_a_schedule_that_comes_before_the_first_iteration_is_skipped_and_a_person_is_refused(
    tmp_path: Path, command: str
) -> None:
    from pipelines.config.run_config import load_config

    own = os.environ | {"TROUPE_RUN_CONFIG": load_config(DEMO).model_dump_json()}
    asked = [TROUPE, command, "--run", "demo"]
    done = subprocess.run(asked, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and '{"skip": "run \'demo\' has not been started' in done.stdout, done.stderr
    assert "no run 'demo' below runs" in said(tmp_path, command, "--run", "demo")
