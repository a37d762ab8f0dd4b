"""The run of the single agent: what it shares with the team's run, what it leaves out, and what cannot be compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.config.run_config import load_config
from pipelines.extensions.compare.compare import alone_config, compare_with_one
from pipelines.extensions.compare.config import CompareConfig
from pipelines.run.run import Run
from pipelines.runners.validate import check
from serve_apps.authoring.workflow import load_workflow
from stores.types import ModelVersionRef

pytestmark = pytest.mark.fast

ONE_STEP = {"path": "pipelines.examples.small_sums.workflow:OneStep"}


def run_of(
    changes: dict[str, Any], *, place: str = "infra/extensions/compare/demo.yaml", has_version_zero: bool = True
) -> Run:
    run = Run(load_config(place, changes))

    def ref(name: str, version: int) -> ModelVersionRef | None:
        if not has_version_zero:
            return None
        return ModelVersionRef(model_group=name, version=version, uri=f"weights/{name}/{version}", manifest_sha256="")

    run.__dict__["weights"] = SimpleNamespace(ref=ref)
    return run


def test_the_single_agent_has_the_teams_tasks_training_and_first_weights() -> None:
    run = run_of(
        {
            "evaluate.control": {"agent": "solver"},
            "cost": {"at_most": 50},
            "storage.weights": "all-weights",
        }
    )
    alone = alone_config(run)
    assert alone.run == "demo-alone"
    assert {name: g.agents for name, g in alone.model_groups.items()} == {"solver_verifier": ("solver",)}
    assert alone.model_groups["solver_verifier"].model == "weights/solver_verifier/0"
    assert alone.evaluate.control is None and alone.evaluate.every == run.config.evaluate.every
    assert (
        alone.warmstart is None
        and alone.cost is None
        and alone.section_of("compare", CompareConfig) is None
        and alone.schedule is None
    )
    assert (alone.tasks, alone.train, alone.collect) == (run.config.tasks, run.config.train, run.config.collect)
    assert (alone.iterations, alone.seed, alone.credit) == (run.config.iterations, run.config.seed, run.config.credit)
    assert alone.agents["solver"].max_tokens == 40 and set(alone.agents) == {"solver"}
    assert alone.storage.weights == "all-weights/demo-alone", "versions of the same group must not be mixed"
    workflow = load_workflow(alone.workflow.path, alone.workflow.settings)
    assert set(workflow.agents) == {"solver"}


def test_another_workflow_credit_rule_and_key_can_be_given() -> None:
    compare = {
        "workflow": ONE_STEP,
        "model_group": "refiner_finalizer",
        "credit": {"path": "pipelines.credit.outcome:OutcomeShare", "settings": {"metric": "math"}},
        "set": {"agents.solver.max_tokens": 64},
    }
    alone = alone_config(run_of({"compare": compare}))
    assert alone.workflow.path == ONE_STEP["path"] and alone.credit.path.endswith("OutcomeShare")
    assert alone.agents["solver"].max_tokens == 64
    assert alone.model_groups["refiner_finalizer"].model == "weights/refiner_finalizer/0"


def test_adapters_begin_from_their_base() -> None:
    changes = {
        "train.lora": {"rank": 4, "alpha": 8},
        "model_groups": {
            "a": {"agents": ["solver", "verifier"], "base": "tiny"},
            "b": {"agents": ["refiner", "finalizer"], "base": "tiny"},
        },
    }
    group = alone_config(run_of(changes)).model_groups["a"]
    assert group.model == "weights/tiny/0" and group.base == "tiny"


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        (None, r"run 'demo' has no `compare` section: add one to its RUN.yaml"),
        (
            {"agent": "solvr"},
            r"compare\.agent: 'solvr' is no agent of the workflow: finalizer, refiner, solver, verifier",
        ),
        ({"agent": "solver", "model_group": "x"}, r"compare\.model_group: 'x' is none of the model groups"),
        (
            {"workflow": {"path": "pipelines.examples.small_sums.workflow:TwoSteps"}},
            r"has the agents first, second: name",
        ),
        ({"agent": "solver", "set": {"train.algoritm": "ppo"}}, r"compare of run 'demo'.*algoritm"),
    ],
)
def test_what_is_no_single_agent_is_refused(compare: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alone_config(run_of({"compare": compare}))


@pytest.mark.parametrize("compare", [{}, {"agent": "solver", "workflow": ONE_STEP}])
def test_either_an_agent_or_a_workflow_is_named(compare: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give either `agent`"):
        run_of({"compare": compare})


def test_an_agent_that_needs_more_than_the_task_cannot_work_alone() -> None:
    with pytest.raises(ValueError, match="agent 'verifier' cannot solve a task alone"):
        check(alone_config(run_of({"compare": {"agent": "verifier"}})))


def test_a_version_zero_that_was_removed_is_named() -> None:
    with pytest.raises(ValueError, match="version 0 of model group 'solver_verifier' is not stored any more"):
        alone_config(run_of({}, has_version_zero=False))


def test_a_run_that_is_not_finished_is_refused_before_anything_starts(tmp_path: Any) -> None:
    run = run_of({"storage.root": str(tmp_path)})
    run.begin()
    with pytest.raises(ValueError, match="has not played its test tasks before training: finish it first"):
        compare_with_one(run, screen=SimpleNamespace())
