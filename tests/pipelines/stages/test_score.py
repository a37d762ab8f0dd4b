"""The score stage: every episode that some model group trains on is paid, no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from stage_records import collected, finish

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.stages.score import score
from stores.types import EpisodeStatus, Purpose, Trace

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
STATUSES = list(EpisodeStatus)


def of_group(trace: Trace) -> Trace:
    """The episode, played by the one model group of the config."""
    return replace(trace, turns=tuple(replace(turn, model_group="team") for turn in trace.turns))


@pytest.mark.parametrize(
    ("train_statuses", "paid"),
    [
        (("ok", "truncated"), {"ok", "truncated"}),
        (("ok",), {"ok", "truncated"}),  # truncated episodes count in what is reported
        (("ok", "truncated", "timeout", "tool_error"), {"ok", "truncated", "timeout", "tool_error"}),
    ],
)
def test_episodes_are_paid_whose_status_counts_or_is_trained_on(
    make_trace: Callable[..., Trace], tmp_path: Path, train_statuses: tuple[str, ...], paid: set[str]
) -> None:
    changes = {"storage.root": str(tmp_path), "model_groups.team.train": {"train_statuses": train_statuses}}
    run = Run(load_config(SMALL, changes))
    run.open()
    where = {"run_id": run.run_id, "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
    traces = [of_group(make_trace(i, **where, status=status)) for i, status in enumerate(STATUSES)]
    run.traces.write_episodes(traces)
    finish(run, 1, collected(traces=run.traces.pin_episodes(**where)))
    rewards = {r.episode_id: r for r in run.traces.read_rewards(score(run, 1).rewards)}
    assert {trace.status.value for trace in traces if trace.episode_id in rewards} == paid


def scored_run(traces: Sequence[Trace], root: Path, **changes: object) -> Run:
    run = Run(load_config(SMALL, {"storage.root": str(root), **changes}))
    run.open()
    where = {"run_id": run.run_id, "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
    run.traces.write_episodes([of_group(replace(trace, **where)) for trace in traces])
    statuses = dict(Counter(trace.status.value for trace in traces))
    finish(run, 1, collected(traces=run.traces.pin_episodes(**where), statuses=statuses))
    return run


def emptied(trace: Trace) -> Trace:
    turns = tuple(replace(turn, completion_token_ids=(), rollout_logprobs=()) for turn in trace.turns)
    return replace(trace, turns=turns)


@pytest.mark.parametrize(
    ("status", "is_empty", "said"),
    [
        (
            EpisodeStatus.AGENT_ERROR,
            False,
            r"no episode that counts has a turn\. Episodes: 2 agent_error\. To mend it, look at",
        ),
        (
            EpisodeStatus.TRUNCATED,
            False,
            r"no episode has a status that trains \(ok\).*Episodes: 2 truncated.*raise max_tokens",
        ),
        (EpisodeStatus.OK, True, "every completion of the episodes that count is empty"),
    ],
)
def test_score_fails_where_nothing_could_ever_be_trained(
    make_trace: Callable[..., Trace], tmp_path: Path, status: EpisodeStatus, is_empty: bool, said: str
) -> None:
    traces = [make_trace(i, status=status) for i in range(2)]
    changes = {"model_groups.team.train": {"train_statuses": ("ok",)}}
    run = scored_run([emptied(trace) if is_empty else trace for trace in traces], tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"iteration 1: nothing can be trained: {said}"):
        score(run, 1)


def test_one_episode_that_trains_is_enough(make_trace: Callable[..., Trace], tmp_path: Path) -> None:
    traces = [make_trace(i, status=status) for i, status in enumerate([EpisodeStatus.AGENT_ERROR, EpisodeStatus.OK])]
    assert score(scored_run(traces, tmp_path), 1).agents
