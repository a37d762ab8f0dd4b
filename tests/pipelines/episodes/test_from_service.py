"""What was served and judged -> episodes of an iteration: which are taken, what they earn, and that it is done once."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_source import Stored, open_run

from pipelines.credit.math_progress import MathProgress
from pipelines.credit.rule import caller_credit, credits_of, score_traces
from pipelines.episodes.from_service import served_group, take_served
from pipelines.run.run import Run
from stores.traces.served import Feedback, ServedStore
from stores.types import SERVED, Cause, EpisodeStatus, Purpose, Trace
from tests.train_loops.synthetic_traces import GROUP, sample_traces

pytestmark = pytest.mark.test

ABOUT = {"team": "again", "team_version": 1, "alias": "champion", "key": "web", "is_trainable": True}


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Run:
    run = Stored(tmp_path, tiny_model).learner("again", **{"collect.from_service": {"max_episodes": 3}})
    run.open()
    return run


def serve(run: Run, traces: list[Trace], scores: list[float | None]) -> list[Trace]:
    """Stores traces as served and judged, a second apart; a score of None: a comment."""
    store = ServedStore(run.served_uri)
    store.create()
    begun = time.time() - 100
    served = [
        replace(
            trace,
            run_id="service",
            episode_id=f"chatcmpl-{i}",
            purpose=Purpose.AD_HOC,
            started_at=begun + i,
            outcome_metadata={SERVED: ABOUT, **trace.outcome_metadata},
        )
        for i, trace in enumerate(traces)
    ]
    store.write_episodes(served)
    for trace, score in zip(served, scores, strict=True):
        said = None if score is not None else "well"
        store.write_feedback(Feedback(trace_id=trace.episode_id, key="web", at=begun, score=score, comment=said))
    return served


def take(run: Run, iteration: int = 1) -> tuple[dict[str, int], list[Trace]]:
    models = run.parents(1)
    counts = take_served(run, iteration, team_spec=run.team_spec(models), models=models)
    found = run.traces.find_traces(run_id=run.run_id, iteration=iteration)
    return counts, sorted(found, key=lambda trace: trace.outcome_metadata[SERVED]["trace_id"])


def some_traces(run: Run, num: int) -> list[Trace]:
    return sample_traces(Path(run.parents(1)[GROUP].uri), run_id="x", num_tasks=num, group_size=1)[0]


def test_the_newest_judged_episodes_are_taken_once_and_a_repetition_takes_the_same(run: Run) -> None:
    serve(run, some_traces(run, 5), [1.0, -1.0, 0.5, None, 0.0])
    counts, taken = take(run)
    assert counts == {"taken": 3, "held_out": 0, "left": 1}
    assert [t.outcome_metadata[SERVED]["trace_id"] for t in taken] == ["chatcmpl-1", "chatcmpl-2", "chatcmpl-4"]
    assert {(t.group_id, t.purpose) for t in taken} == {(served_group(run, 1), Purpose.TRAIN)}
    ServedStore(run.served_uri).write_feedback(Feedback(trace_id="chatcmpl-3", key="web", at=0, score=1.0))
    assert take(run) == (counts, taken)
    counts, taken = take(run, 2)
    assert [t.outcome_metadata[SERVED]["trace_id"] for t in taken] == ["chatcmpl-0", "chatcmpl-3"]


@pytest.mark.nightly
def test_what_cannot_be_trained_on_is_left_and_counted(run: Run) -> None:
    good, penalised, failed, foreign, filtered, old, malformed = some_traces(run, 7)
    turn = filtered.turns[0]
    given = [
        good,
        replace(penalised, outcome_metadata={SERVED: {**ABOUT, "is_trainable": False}}),
        replace(failed, status=EpisodeStatus.TOOL_ERROR, cause=Cause.INFRASTRUCTURE),
        replace(foreign, turns=(replace(foreign.turns[0], agent="somebody"),)),
        replace(filtered, turns=(replace(turn, sampling=replace(turn.sampling, top_p=0.9)),)),
        replace(old, turns=(replace(old.turns[0], policy_version=7),)),
        replace(malformed, status=EpisodeStatus.TOOL_ERROR, cause=Cause.POLICY),
    ]
    serve(run, given, [1.0] * 7)
    counts, taken = take(run)
    assert counts == {"taken": 2, "held_out": 0, "left": 5}
    assert [trace.outcome_metadata[SERVED]["trace_id"] for trace in taken] == ["chatcmpl-0", "chatcmpl-6"]


def test_a_store_that_is_not_there_yet_gives_nothing(run: Run) -> None:
    assert take(run) == ({"taken": 0, "held_out": 0, "left": 0}, [])


@pytest.mark.nightly
def test_the_callers_word_is_the_credit_and_the_rule_sees_the_others(run: Run) -> None:
    served, own = some_traces(run, 2)
    served = replace(served, outcome_metadata={SERVED: {**ABOUT, "trace_id": "x", "score": 0.5}})
    first, second = score_traces(run.credit, [served, own], version="v")
    assert first.outcome == 0.75
    assert [r.reward for r in first.rewards] == [0.75] * len(served.turns)
    assert second.rewards == run.credit.assign_credit(own).rewards
    assert [r.reward for r in caller_credit(MathProgress(), served, -1.0).rewards] == [0.0] * len(served.turns)
    assert [r.reward for r in caller_credit(MathProgress(), served, 1.0).rewards][-1] == 1.0
    assert len(credits_of(run.credit, [served])) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"collect.variants": {"kind": "greedy"}, "train": {"algorithm": "remax"}}, "cannot be played again"),
        ({"train": {"mismatch": {"old_logprobs": "rollout_if_close"}}}, "old_logprobs: recompute"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        open_run("x", tmp_path, tiny_model, **{"collect.from_service": {}, **changes})


def test_where_iterations_overlap_the_newest_version_that_answered_may_be_newer_than_the_one_that_samples(
    run: Run,
) -> None:
    overlapping = Run(run.config.model_copy(update={"loop": run.config.loop.model_copy(update={"max_lag": 1})}))
    traces = some_traces(run, 1)
    newer = [
        replace(trace, turns=tuple(replace(turn, policy_version=2) for turn in trace.turns)) for trace in traces * 1
    ]
    serve(overlapping, newer, [1.0])
    models = run.parents(1)
    asked = {"team_spec": run.team_spec(models), "models": models}
    assert take_served(overlapping, 3, **asked)["taken"] == 1, "version 2 is what iteration 3 trains from"
    assert take_served(run, 4, **asked)["taken"] == 0, "without overlap nothing newer than the parent is there"
