"""The control of a team: what `troupe validate` refuses, what acts in its episodes, and the difference that is reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import MakeTrace

from pipelines.config.run_config import load_config
from pipelines.report.page import ReportData, render
from pipelines.report.result import team_over_control
from pipelines.run.run import Run
from pipelines.runners.validate import check
from serve_apps.authoring.agent import Tool
from serve_apps.workflows.math_chain import MathChain
from stores.journal.stage_results import Control, Measured, TeamScore
from tests.stage_records import model_ref, team_score, traces_ref

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


async def _double(number: int) -> int:
    return 2 * number


class WithTool(MathChain):
    """A team that has a tool."""

    double = Tool(_double)


def measured(outcomes: dict[str, float], control: dict[str, float] | None) -> Measured:
    def score(of: dict[str, float]) -> TeamScore:
        return team_score(accuracy=sum(of.values()) / len(of), num_tasks=len(of), traces=traces_ref())

    return Measured(
        score=score(outcomes),
        iteration=0,
        outcomes={task: (value,) for task, value in outcomes.items()},
        sampling_seconds=1.0,
        num_tokens=10,
        control=None
        if control is None
        else Control(
            agent="solver",
            budget_tokens=24.5,
            num_tokens=30.0,
            num_answers=2.5,
            score=score(control),
            outcomes={task: (value,) for task, value in control.items()},
        ),
    )


def test_a_control_needs_test_tasks_an_agent_that_reads_only_the_task_and_a_field_of_its_contract() -> None:
    assert check(load_config(SMALL, {"evaluate.control": {"agent": "solver"}})) == check(load_config(SMALL))
    for changes, message in (
        ({"evaluate.control": {"agent": "solvr"}}, "evaluate.control.agent: 'solvr' is no agent .* 'solver'"),
        (
            {"evaluate.control": {"agent": "verifier"}},
            "'verifier' cannot solve a task alone: .*answer, question, solution",
        ),
        ({"evaluate.control": {"agent": "solver", "answer": "answr"}}, "evaluate.control.answer: 'answr' .*'answer'"),
        ({"evaluate.control": {"agent": "solver"}, "tasks.test": None}, "tasks.test is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            check(load_config(SMALL, changes))


def test_a_team_with_tools_has_no_control() -> None:
    config = load_config(SMALL, {"workflow.path": f"{__name__}:WithTool", "evaluate.control": {"agent": "solver"}})
    with pytest.raises(ValueError, match=r"evaluate\.control: the control calls no tools, and the workflow has double"):
        check(config)


def test_a_run_that_began_without_a_control_is_still_the_same_run() -> None:
    assert "control" not in str(load_config(SMALL).model_dump(exclude_defaults=True))
    assert load_config(SMALL).sha256 != load_config(SMALL, {"evaluate.control": {"agent": "solver"}}).sha256
    assert load_config(SMALL).sha256 == load_config(SMALL, {"evaluate.control": None}).sha256


def test_a_measurement_with_its_control_survives_the_journal() -> None:
    for each in (measured({"a": 1.0}, {"a": 0.0}), measured({"a": 1.0}, None)):
        assert Measured.from_json(each.to_json()) == each


@dataclass
class OneModel:
    """The part of `Played` that a control reads."""

    models: dict[str, Any]


def test_the_control_has_the_agents_model_prompt_and_sampling_and_episodes_of_its_own(tmp_path: Path) -> None:
    from pipelines.evaluation.control import control_spec

    run = Run(load_config(SMALL, {"storage.root": str(tmp_path), "evaluate.control": {"agent": "solver"}}))
    models = {"team": model_ref("team", 3)}
    spec = control_spec(run, OneModel(models), 24.5)  # type: ignore[arg-type]
    team = run.team_spec(models)
    assert spec.sampling == {"solver": team.sampling["solver"]} and spec.sampling["solver"].max_tokens == 40
    assert spec.group_of == {"solver": "team"} and spec.policy_versions == {"team": 3}
    keys = {team.team_key, spec.team_key, control_spec(run, OneModel(models), 30.0).team_key}  # type: ignore[arg-type]
    assert len(keys) == 3


def test_the_control_of_a_greedy_team_samples_as_in_training(tmp_path: Path) -> None:
    from pipelines.evaluation.control import control_spec

    for temperature, expected in ((0, 1.0), (0.5, 0.5), (None, 1.0)):
        changes = {"evaluate.control": {"agent": "solver"}, "evaluate.temperature": temperature}
        run = Run(load_config(SMALL, {"storage.root": str(tmp_path), **changes}))
        spec = control_spec(run, OneModel({"team": model_ref("team", 3)}), 24.5)  # type: ignore[arg-type]
        assert spec.sampling["solver"].temperature == expected


def test_the_tokens_of_an_episode_are_those_of_all_its_turns(make_trace: MakeTrace) -> None:
    from pipelines.evaluation.control import mean_tokens

    traces = [make_trace(0), make_trace(1)]
    wanted = [sum(len(turn.completion_token_ids) for turn in trace.turns) for trace in traces]
    assert mean_tokens(traces) == sum(wanted) / 2 > 0 and mean_tokens([]) == 0


def test_the_difference_is_paired_on_the_tasks_that_both_have_and_the_page_shows_it() -> None:
    run: Any = SimpleNamespace(config=load_config(SMALL))
    tasks = [f"t{i}" for i in range(20)]
    team = {task: float(i < 15) for i, task in enumerate(tasks)} | {"only the team's": 1.0}
    alone = {task: float(i < 10) for i, task in enumerate(tasks)}
    found = team_over_control(run, measured(team, alone))
    assert found is not None and found["team_minus_control"]["mean"] == pytest.approx(0.25)
    assert found["team_minus_control"]["num_tasks"] == 20 and found["tokens_of_team"] == 24.5
    assert team_over_control(run, measured(team, None)) is None
    page = render(
        ReportData(run_id="r", headline={"before": {"accuracy": 0.75}}, control={"before": found}, iterations=[])
    )
    assert "One agent alone with the team" in page and "+25.0" in page and "24.5" in page
    assert "One agent alone" not in render(ReportData(run_id="r", headline={}, iterations=[]))
