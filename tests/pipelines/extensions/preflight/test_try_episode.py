"""`troupe validate --try`: one episode against a model that says what agents must say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import RunConfig, load_config
from pipelines.credit.rule import Credit
from pipelines.extensions.preflight.try_episode import TriedEpisodeFailed, example_of, try_episode
from serve_apps.authoring.contracts import Boxed, Contract, JsonKeys, OneOf, Raw, Tags, Thinking
from stores.types import Trace

pytestmark = pytest.mark.test

ROOT = Path(__file__).parents[4]


def config(name: str, **changes: Any) -> RunConfig:
    return load_config(ROOT / name, changes)


@pytest.mark.parametrize(
    "contract",
    [
        Raw(),
        Tags("ANSWER"),
        Tags("STATUS", "FEEDBACK", choices={"STATUS": ("right", "wrong")}),
        OneOf("search", "answer"),
        Thinking(Tags("answer")),
        Boxed(),
        JsonKeys("plan", "queries"),
    ],
    ids=lambda contract: type(contract).__name__,
)
def test_an_example_has_no_fault(contract: Contract) -> None:
    assert contract.parse(example_of(contract)).fault == ""


def test_a_workflow_shows_its_turns_and_what_the_credit_rule_makes_of_them() -> None:
    lines = list(try_episode(config("infra/runs/demo.yaml")))
    agents = [line.split()[1] for line in lines if line[0].isdigit()]
    assert agents == ["solver", "verifier", "refiner", "finalizer"]
    assert lines[0].startswith("task arithmetic-") and "; answer: " in lines[-2]
    assert lines[-1].startswith("credit: outcome ") and "turn 3" in lines[-1]


def test_a_program_with_tools_plays_to_its_end() -> None:
    lines = list(try_episode(config("infra/workflows/calculator_program.yaml")))
    assert sum("tool calculate {'expression':" in line for line in lines) >= 1
    assert lines[-2].startswith("ok, finished; answer: ")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([sys.executable, "-c", "import no_such_framework"], "No module named 'no_such_framework'"),
        ([sys.executable, "-c", "print(55)"], "it must call the base URL in OPENAI_BASE_URL"),
    ],
)
def test_a_command_that_can_never_work_says_why(command: list[str], said: str) -> None:
    changes = {"workflow.settings.command": command, "workflow.settings.function": None}
    shown = []
    with pytest.raises(TriedEpisodeFailed, match=said):
        for line in try_episode(config("infra/workflows/calculator_program.yaml", **changes)):
            shown.append(line)
    assert shown[-1].startswith("agent_error, ")


def test_an_outcome_beyond_a_share_is_told() -> None:
    lines = list(
        try_episode(config("infra/runs/demo.yaml", **{"credit.path": f"{__name__}:Threefold", "credit.settings": {}}))
    )
    assert lines[-1].startswith("credit: outcome 3, which is beyond [0, 1]: ")


class Threefold:
    """Gives every episode three."""

    kind = "returns"

    def assign_credit(self, trace: Trace) -> Credit:
        return Credit(outcome=3.0, rewards=())


def test_a_demonstrator_that_does_not_know_the_tasks_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"question": "How many legs has a fly?", "answer": "6"}\n')
    changes = {"tasks.train": {"path": str(tmp_path / "t.jsonl")}, "collect.tasks_per_iteration": 1}
    with pytest.raises(
        TriedEpisodeFailed, match=r"warmstart\.demonstrator '.*arithmetic.*' raised .*: where it was written for"
    ):
        list(try_episode(config("infra/workflows/math_chain.yaml", **changes)))


def test_without_a_demonstrator_agents_say_what_fits() -> None:
    lines = list(try_episode(config("infra/runs/demo-real.yaml")))
    agents = [line.split()[1] for line in lines if line[0].isdigit()]
    assert agents == ["solver", "checker"]
    assert "format: not one line" in lines[1], (
        "of a contract that is not Troupe's own no example is known, and it says so"
    )
    assert lines[-2].startswith("ok, ")
