"""endings: what the gate says of episodes that are not ok."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from records import MakeTrace

from pipelines.credit.outcome import OutcomeShare
from pipelines.evaluation.played import CURES, Played, endings_in_words
from serve_apps.episode.runner import CONTEXT_EXHAUSTED
from stores.types import SOUND, Cause, EpisodeStatus, FinishReason, Trace

pytestmark = pytest.mark.fast


def cut(trace: Trace, agent: str, *, max_tokens: int) -> Trace:
    """The episode with a turn of `agent` that ran into `max_tokens`."""
    turns = tuple(
        replace(t, finish_reason=FinishReason.LENGTH, sampling=replace(t.sampling, max_tokens=max_tokens))
        if t.agent == agent
        else t
        for t in trace.turns
    )
    return replace(trace, status=EpisodeStatus.TRUNCATED, turns=turns)


def test_a_team_without_any_outcome_has_a_score_that_says_so(make_trace: MakeTrace) -> None:
    lost = [make_trace(i, status=EpisodeStatus.INFRA_ERROR, cause=Cause.INFRASTRUCTURE) for i in range(4)]
    run: Any = SimpleNamespace(
        traces=SimpleNamespace(read_traces=lambda ref: lost),
        credit=OutcomeShare(),
        credit_version="v",
        config=SimpleNamespace(evaluate=SimpleNamespace(episodes_per_task=2)),
    )
    sampled: Any = SimpleNamespace(traces=None)
    score = Played(run, sampled, {}).score(run)
    assert (score.accuracy, score.ci95, score.num_tasks, score.num_failed) == (0.0, (0.0, 1.0), 0, 4)
    assert (score.ok_share, score.pass_at_k, score.causes) == (0.0, None, {"infrastructure": 4})


def test_truncated_episodes_name_the_agent_its_limit_and_the_key(make_trace: MakeTrace) -> None:
    episodes = [cut(make_trace(i), "solver", max_tokens=24) for i in range(3)] + [make_trace(3)]
    assert endings_in_words(episodes, {"solver": 24, "verifier": 16}) == (
        "3 of 4 are truncated (in 3 solver ran into its max_tokens = 24: raise agents.solver.max_tokens)"
    )


def test_a_limit_below_the_agents_own_is_that_of_the_context(make_trace: MakeTrace) -> None:
    said = endings_in_words([cut(make_trace(), "solver", max_tokens=10)], {"solver": 24})
    assert "in 1 solver had room for fewer tokens than its max_tokens: raise serve.max_model_len" in said
    exhausted = make_trace(status=EpisodeStatus.TRUNCATED, stop_reason=CONTEXT_EXHAUSTED)
    assert "a prompt left no room in the context: raise serve.max_model_len" in endings_in_words([exhausted], {})


def test_a_workflow_that_stops_by_itself_is_not_told_to_raise_a_limit(make_trace: MakeTrace) -> None:
    assert "in 1 the workflow ended them as truncated" in endings_in_words(
        [make_trace(status=EpisodeStatus.TRUNCATED)], {"solver": 24}
    )


def test_every_status_that_is_not_ok_has_a_cure_and_the_most_frequent_comes_first(make_trace: MakeTrace) -> None:
    assert set(CURES) == set(EpisodeStatus) - set(SOUND)
    statuses = [EpisodeStatus.TIMEOUT, EpisodeStatus.INFRA_ERROR, EpisodeStatus.INFRA_ERROR, EpisodeStatus.OK]
    said = endings_in_words([make_trace(i, status=s) for i, s in enumerate(statuses)], {})
    assert said.startswith("2 of 4 are infra_error (") and "; 1 of 4 are timeout (raise collect.episode" in said
    assert endings_in_words([make_trace()], {}) == ""
