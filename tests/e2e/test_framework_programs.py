"""Programs of agent frameworks, each in an environment of its own from exact requirements, through the whole loop."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from serve_apps.program.conversations import CONVERSATIONS
from stores.types import Trace
from tests.e2e.local_runs import COMMAND, DEADLINE_S, report_of

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
TROUPE = COMMAND[0]
TOOLS = {
    "openai_agents": {("triage", "transfer_to_calculator"), ("calculator", "calculate")},
    "langgraph": {("calculator", "calculate")},
    "pydantic_ai": {("calculator", "calculate")},
}
"""By framework, the agents and the tools that they have."""


@pytest.fixture(scope="module", params=TOOLS)
def changes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A framework with its environment, and what its config needs to find it and to be small. Needs a package index."""
    name: str = request.param
    root = tmp_path_factory.mktemp(name)
    subprocess.run([sys.executable, "-m", "venv", root / "venv"], check=True)
    python = root / "venv" / "bin" / "python"
    requirements = ROOT / "pipelines" / "examples" / name / "requirements.txt"
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "-r", requirements], capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr
    program = f"pipelines/examples/{name}/program.py"
    settings = {
        "storage.root": str(root / "runs"),
        "workflow.settings.command": [str(python), program],
        # So short a warm start solves no task: length pays, and every turn has something to learn from.
        "credit.path": "tests.bench.paid_by_length:PaidByLength",
        "credit.settings": {},
        "iterations": 2,
        "warmstart.num_demonstrations": 300,
        "warmstart.num_epochs": 4,
        "warmstart.batch_turns": 16,
        "collect.tasks_per_iteration": 16,
        "collect.episodes_per_task": 4,
        "collect.episodes_in_flight": 4,
        "evaluate.every": 2,
        "tasks.gate.count": 16,
        "tasks.test.count": 16,
    }
    return name, [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@pytest.fixture(scope="module")
def trained(changes: tuple[str, list[str]]) -> tuple[str, Run]:
    """A framework and a finished run of two iterations."""
    name, options = changes
    config = ROOT / "infra" / "programs" / f"{name}.yaml"
    done = subprocess.run(
        [TROUPE, "train", config, *options], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr[-6000:]
    values = dict(option.split("=", 1) for option in options[1::2])
    return name, Run(load_config(config, {key: json.loads(value) for key, value in values.items()}))


def episodes(run: Run) -> list[Trace]:
    return [t for n in (1, 2) for t in run.traces.read_traces(run.iteration(n).collected.traces)]


def test_one_episode_is_tried_before_training(changes: tuple[str, list[str]]) -> None:
    name, options = changes
    command = [TROUPE, "validate", f"infra/programs/{name}.yaml", *options, "--try"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tool " in done.stdout and "credit: outcome " in done.stdout


def test_every_agent_is_trained_and_no_conversation_is_broken(trained: tuple[str, Run]) -> None:
    name, run = trained
    agents = {agent for agent, _ in TOOLS[name]}
    report = report_of(run)
    assert report["funnel"].keys() == agents and all(of["trained"] > 0 for of in report["funnel"].values())
    assert 0 < report["logprob_gap"]["mean"] < 1e-3
    counts = Counter[str]()
    for trace in episodes(run):
        for of_agent in trace.outcome_metadata[CONVERSATIONS].values():
            counts.update(of_agent)
    assert counts["grown"] > 50 and not counts["broken"]


def test_a_call_is_credited_to_the_agent_that_made_it(trained: tuple[str, Run]) -> None:
    name, run = trained
    callers = Counter[tuple[str, str]]()
    for trace in episodes(run):
        agent_of = {turn.turn_index: turn.agent for turn in trace.turns}
        for call in trace.tool_calls:
            assert [agent_of[parent] for parent in call.parents] == [call.caller]
            callers[call.caller, call.tool] += 1
    assert callers.keys() == TOOLS[name]


def test_turns_are_constrained_where_a_call_is_forced_and_else_free(trained: tuple[str, Run]) -> None:
    name, run = trained
    turns = [turn for trace in episodes(run) for turn in trace.turns]
    assert {bool(turn.sampling.constraint) for turn in turns} == {name == "pydantic_ai"}
    assert {turn.sampling.temperature for turn in turns} == {1.0}
