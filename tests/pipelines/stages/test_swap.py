"""CORY: every few iterations two model groups exchange their agents, in the episodes that are trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_config import RunConfig, load_config
from pipelines.run.run import Run
from pipelines.run.scoring import assign_credit
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import AgentCall
from serve_apps.episode_spec import EpisodeSpec
from stores.types import Completion, FinishReason, ModelVersionRef, Purpose, Trace
from train_loops.rows.samples import samples_of

pytestmark = pytest.mark.test

CORY = Path(__file__).parents[3] / "infra" / "workflows" / "pioneer_observer.yaml"
CHAIN = CORY.with_name("math_chain.yaml")
AS_CONFIGURED = {"pioneer": "first", "observer": "second"}
SWAPPED = {"pioneer": "second", "observer": "first"}


def config(changes: Mapping[str, Any] | None = None) -> RunConfig:
    return load_config(CORY, {"swap.every": 5, **(changes or {})})


def test_the_roles_change_places_every_five_iterations() -> None:
    found = [config().groups_at(iteration) for iteration in range(1, 13)]
    assert found == [AS_CONFIGURED] * 5 + [SWAPPED] * 5 + [AS_CONFIGURED] * 2
    assert config().groups_at(0) == config().group_of == AS_CONFIGURED
    assert config({"swap": None}).groups_at(6) == AS_CONFIGURED


def play(run: Run, iteration: int, model: Path) -> Trace:
    """An episode that the team spec of an iteration plays with scripted completions: both agents answer rightly."""
    versions = {g: ModelVersionRef(model_group=g, version=0, uri="", manifest_sha256="") for g in ("first", "second")}
    team_spec = replace(run.team_spec(versions, iteration=iteration), tokenizers=dict.fromkeys(versions, str(model)))
    team = team_spec.build()
    task = run.tasks("train")[0]

    async def complete(call: AgentCall) -> Completion:
        tokenizer = team.tokenizers[call.request.model_group]
        ids = tokenizer.encode_completion(f"<SOLUTION>s</SOLUTION><ANSWER>{task.answers[0]}</ANSWER>")
        return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason=FinishReason.STOP, policy_version=0)

    spec = EpisodeSpec(
        run_id=run.run_id,
        iteration=iteration,
        purpose=Purpose.TRAIN,
        team_key=team_spec.team_key,
        task=task,
        episode_index=0,
        run_seed=0,
    )
    return asyncio.run(run_episode(spec, team=team, complete=complete, limits=team_spec.limits))


@pytest.mark.parametrize(
    ("iteration", "group_of"), [(1, AS_CONFIGURED), (5, AS_CONFIGURED), (6, SWAPPED), (11, AS_CONFIGURED)]
)
def test_traces_name_the_swapped_group_and_it_is_what_trains_on_the_turn(
    iteration: int, group_of: dict[str, str], tiny_model: Path
) -> None:
    run = Run(config())
    trace = play(run, iteration, tiny_model)
    assert {turn.agent: turn.model_group for turn in trace.turns} == group_of
    (rewards,) = assign_credit(run, [trace])
    assert [r.reward for r in rewards.rewards] == [2.0, 2.0], "both are paid r1 + r2"
    for group in ("first", "second"):
        (row,) = samples_of(trace, rewards, model_group=group)
        assert group_of[row.agent] == group


def test_a_run_without_a_swap_keeps_its_identity_and_one_with_a_swap_is_another() -> None:
    assert config({"swap": None}).sha256 != config().sha256 != config({"swap.every": 4}).sha256
    data = config({"swap": None}).model_dump(mode="json")
    del data["swap"]
    assert RunConfig.model_validate(data).sha256 == config({"swap": None}).sha256


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ({"groups": ["refiner_finalize", "solver_verifier"]}, r"no model group: did you mean 'refiner_finalizer'\?"),
        (
            {"groups": ["solver_verifier", "refiner_finalizer"]},
            r"'solver_verifier' has the agents solver, verifier: two",
        ),
        ({"groups": ["refiner_finalizer", "refiner_finalizer"]}, r"cannot exchange agents with itself"),
    ],
)
def test_what_cannot_be_swapped_is_refused(swap: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(CHAIN, {"swap": swap})
