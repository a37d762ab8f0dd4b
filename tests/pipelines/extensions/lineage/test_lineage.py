"""What was trained on an episode: only what a trainer had a row of. Real LanceDB, journal, weights, registry, credit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage_records import collected, finish, trained
from stored_source import Stored

from pipelines.extensions.lineage.lineage import lineage_of_episode, lineage_of_team
from pipelines.extensions.other_runs.from_run import parse_source, pin_source
from pipelines.run.run import Run
from pipelines.stages.promote import register_team
from pipelines.stages.steps import run_stage
from stores.journal.stage_results import Collected
from stores.types import Cause, EpisodeStatus, ModelVersionRef, Purpose, Trace, TracesRef
from stores.weights.manifest import Probe
from tests.train_loops.synthetic_traces import GROUP, sample_traces

pytestmark = pytest.mark.test


def score_and_train(run: Run, models: Mapping[str, ModelVersionRef], pinned: TracesRef) -> int:
    """Does iteration 1 after these episodes: scored, trained to version 1, registered; returns the version of the team."""
    finish(run, 1, collected(traces=pinned, policy_versions={GROUP: 0}))
    run_stage(run, "score", 1)
    ref = run.weights.commit(
        Path(models[GROUP].uri.removeprefix("file://")),
        model_group=GROUP,
        version=1,
        parent=models[GROUP].version,
        run_id=run.run_id,
        iteration=1,
        probe=Probe(sequences=((3, 4),), logprobs=((-1.0,),)),
    )
    finish(run, 1, trained(model=ref), GROUP)
    return register_team(run, {GROUP: ref}, iteration=1, evaluation={})


def trained_on(run: Run, traces: list[Trace]) -> dict[str, Any]:
    """What iteration 1 of a run leaves that trains on these; returns the lineage of its team, the second one."""
    models = run.parents(1)
    register_team(run, models, iteration=0, evaluation={})
    run.traces.write_episodes(traces)
    pinned = run.traces.pin_episodes(run_id=run.run_id, iteration=1, purpose=Purpose.TRAIN, team_key="v0")
    score_and_train(run, models, pinned)
    return lineage_of_team(run, *run.registry.load(run.team_name, 2))


def some_traces(run: Run, num: int) -> list[Trace]:
    return sample_traces(Path(run.parents(1)[GROUP].uri), run_id=run.run_id, num_tasks=1, group_size=num)[0]


def learnt(run: Run, *traces: Trace) -> list[bool]:
    found = [lineage_of_episode(run, trace.episode_id) for trace in traces]
    assert all(bool(of["trained"]) == bool(of["teams"]) for of in found)
    return [of["trained"] == {GROUP: [1]} for of in found]


def test_nothing_was_trained_on_an_episode_that_no_trainer_had_a_row_of(tiny_model: Path, tmp_path: Path) -> None:
    run = Stored(tmp_path, tiny_model).learner()
    sound, malformed, infra, author, mixed, greedy, silent = some_traces(run, 7)
    malformed = replace(malformed, status=EpisodeStatus.AGENT_ERROR, cause=Cause.POLICY)
    infra = replace(infra, status=EpisodeStatus.INFRA_ERROR, cause=Cause.INFRASTRUCTURE)
    author = replace(author, status=EpisodeStatus.TOOL_ERROR, cause=Cause.AUTHOR)
    mixed, greedy = replace(mixed, is_version_mixed=True), replace(greedy, variant="greedy")
    silent = replace(silent, turns=())
    team = trained_on(run, [sound, malformed, infra, author, mixed, greedy, silent])
    assert learnt(run, sound, malformed) == [True, True]
    assert learnt(run, infra, author, mixed, greedy, silent) == [False] * 5
    assert team["episodes"]["scored"] == 5, "neither of those whose failure the policy did not cause"


def test_an_episode_of_another_run_shaped_what_was_trained_on_its_traces(tiny_model: Path, tmp_path: Path) -> None:
    other = Stored(tmp_path, tiny_model)
    run = other.learner()
    models = run.parents(1)
    register_team(run, models, iteration=0, evaluation={})
    pin_source(run, parse_source(run, "other@1", ""))
    collected_there = run_stage(run, "collect", 1)
    assert isinstance(collected_there, Collected)
    score_and_train(run, models, collected_there.traces)
    assert learnt(run, other.traces[0]) == [True]
    sampled_before = replace(some_traces(run, 1)[0], episode_id="1-sampled", run_id=run.run_id)
    run.traces.write_episodes([sampled_before])
    assert learnt(run, sampled_before) == [False], "a collect that was killed had stored it"
    assert not lineage_of_episode(other.run, other.traces[0].episode_id)["trained"], "that run has not trained yet"


def test_versions_that_may_be_mixed_and_variants_with_siblings_are_trained_on(tiny_model: Path, tmp_path: Path) -> None:
    train = {"train": {"algorithm": "counterfactual", "train_mixed_versions": True}}
    variants = {"collect.variants": {"kind": "counterfactual", "siblings": 2}}
    run = Stored(tmp_path, tiny_model).learner(**train, **variants)
    base, mixed, first, second, greedy = some_traces(run, 5)
    names = ("counterfactual-1", "counterfactual-1#1", "greedy")
    replays = [
        replace(trace, variant=name, episode_index=base.episode_index)
        for trace, name in zip((first, second, greedy), names, strict=True)
    ]
    trained_on(run, [base, replace(mixed, is_version_mixed=True), *replays])
    assert learnt(run, base, mixed, *replays) == [True, True, True, True, False]
