"""What the tutorials show is what `troupe new` writes, and who follows them word for word comes to their end."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.cli.new_team import team_files, write_team
from pipelines.config.run_config import load_config, with_keys
from pipelines.credit.rule import score_traces
from pipelines.run.run import Run
from serve_apps.episode.scripted import play_scripted
from stores.types import Purpose, Task
from tests.docs.markdown_pages import fences
from tests.docs.played_page import SHORT, Reader, clone_into, run_cells
from tests.model_folders import write_model
from tests.servers import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


def sets(values: Mapping[str, Any]) -> str:
    return "".join(f" --set {key}={value}" for key, value in values.items())


def reader_in(folder: Path, **more: Any) -> Reader:
    """A reader before a new clone, whose runs are short."""
    return Reader(clone_into(folder / "troupe"), more={"troupe train": sets(SHORT | more)})


def test_from_a_new_team_to_one_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own team, credit rule, notebook and serving are one way: each page goes on in the folder of the one before."""
    ports = {name: free_port() for name in ("ray", "dashboard", "gateway")}
    # The gate must not promote by chance: the page on serving has a candidate beside the champion.
    changes = {"gateway.port": ports["gateway"], "promote.min_gain": 0.99, "traffic.step_timeout_s": 5}
    reader = reader_in(tmp_path, **changes)
    reader.swaps |= {"--iteration 8": "--iteration 1"}
    reader.follow("own-team.md")
    reader.follow("credit.md")

    monkeypatch.chdir(reader.folder)
    monkeypatch.syspath_prepend(reader.folder)
    assert set(run_cells("notebook.md")["episodes"].purpose) >= {"train", "gate", "test"}
    monkeypatch.delitem(sys.modules, "my_team")

    heads = {"TROUPE_RAY_PORT": str(ports["ray"]), "TROUPE_RAY_DASHBOARD_PORT": str(ports["dashboard"])}
    serving = replace(
        reader, environment=heads | {"NO_PROXY": "127.0.0.1"}, swaps={"demo": "my_team", "curl -s ": "curl -fsS "}
    )
    serving.swaps |= {"127.0.0.1:6399": f"127.0.0.1:{ports['ray']}", "127.0.0.1:8000": f"127.0.0.1:{ports['gateway']}"}
    serving.folder = reader.folder
    try:
        serving.follow("serve.md")
    finally:
        serving.run("make down")


def test_a_world_of_your_own(tmp_path: Path) -> None:
    reader = reader_in(tmp_path)
    reader.swaps["infra/workflows/"] = "../infra/workflows/"  # the page goes back into the clone in words
    reader.follow("worlds.md")


def test_a_program_that_you_have(tmp_path: Path) -> None:
    reader_in(tmp_path).follow("program.md")


def test_a_program_of_an_agent_framework(tmp_path: Path) -> None:
    """Needs a package index."""
    reader_in(tmp_path).follow("frameworks.md")


def test_a_model_of_your_own(tmp_path: Path) -> None:
    """Needs a package index."""
    short = {key: value for key, value in SHORT.items() if "warmstart" not in key} | {
        "tasks.gate.count": 8,
        "tasks.test.count": 8,
    }
    Reader(clone_into(tmp_path / "troupe"), more={"troupe train": sets(short)}).follow("own-model.md")


def test_a_schedule(tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("AIRFLOW", "MLFLOW", "RAY", "RAY_DASHBOARD")}
    own = {f"TROUPE_{name}_PORT": str(port) for name, port in ports.items()} | {"NO_PROXY": "127.0.0.1"}
    own |= {f"AIRFLOW__LOGGING__{name}_LOG_SERVER_PORT": str(free_port()) for name in ("WORKER", "TRIGGER")}
    reader = Reader(clone_into(tmp_path / "troupe"), environment=own)
    reader.swaps |= {"xdg-open": "curl -fsS -o page.html", "127.0.0.1:8080": f"127.0.0.1:{ports['AIRFLOW']}"}
    reader.swaps |= {"127.0.0.1:8299": f"127.0.0.1:{ports['RAY_DASHBOARD']}"}
    demo = reader.clone / "infra" / "runs" / "demo.yaml"
    config = with_keys(yaml.safe_load(demo.read_text()), SHORT)
    schedule = json.dumps(config.pop("schedule"))  # in one line, which the page changes
    demo.write_text(f"{yaml.safe_dump(config)}schedule: {schedule}\n")
    try:
        reader.follow("schedule.md")
    finally:
        reader.run("make down")


def agents_of(source: str) -> list[str]:
    """The agents that the workflow of a module declares, in a form that ignores layout."""
    (workflow,) = [
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "SolveAndReview"
    ]
    return [ast.dump(node) for node in workflow.body if isinstance(node, ast.Assign)]


@pytest.mark.fast
def test_the_first_tutorial_shows_the_workflow_that_troupe_new_writes() -> None:
    (shown,) = [fence.text for fence in fences("infra/docs/tutorials/own-team.md") if fence.language == "python"]
    assert agents_of(shown) == agents_of(team_files("my_team")["my_team.py"])


@pytest.mark.test
def test_the_files_of_the_page_on_an_own_model_validate(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write_model(tmp_path / "models" / "smollm2", head_dim=32)
    reader = Reader(tmp_path, swaps={"troupe model": ": troupe model", "troupe train": ": troupe train"})
    reader.follow("own-model.md")
    reader.run("troupe validate own.yaml")
    assert reader.shown == "own.yaml: ok (1 model groups, 3 agents)\n"


@pytest.mark.test
def test_the_page_for_notebooks_runs_while_a_loop_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_team(tmp_path / "my_team")
    monkeypatch.chdir(tmp_path / "my_team")
    monkeypatch.syspath_prepend(tmp_path / "my_team")
    run = Run(load_config("my_team.yaml"))
    run.open()
    task, texts = Task(task_id="t", prompt="2+3*4", answers=("14",)), ("<STEPS>x</STEPS><ANSWER>14</ANSWER>", "no tags")
    played = [play_scripted(run.workflow, task, {"solver": [texts[n % 2]], "reviewer": [texts[0]]}) for n in range(4)]
    where = {"run_id": "my_team", "iteration": run.config.iterations, "purpose": Purpose.TRAIN}
    traces = [replace(trace, episode_id=f"0008{n:028x}", episode_index=n, **where) for n, trace in enumerate(played)]
    run.traces.write_episodes(traces)
    run.traces.write_rewards(score_traces(run.credit, traces, version=run.scored_version(where["iteration"])))
    cells = run_cells("notebook.md")
    monkeypatch.delitem(sys.modules, "my_team")
    assert cells["trace"].answer == "14"
    assert list(cells["episodes"].outcome) == [1.0] * 4
    assert len(cells["turns"]) == 8 and (cells["turns"].fault != "").sum() == 2
    assert cells["mean_reward"](cells["LastWord"]()).to_dict() == {"reviewer": 1.0}
    assert cells["mean_reward"](cells["AnswerCredit"]()).to_dict() == {"reviewer": 1.0, "solver": 0.75}
