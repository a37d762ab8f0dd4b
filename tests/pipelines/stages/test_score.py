"""The score stage: every episode that is an outcome of the policy is paid, no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from records import MakeTrace
from stage_records import call, collected, finish
from stage_records import scored as scored_result

from pipelines.config.run_config import load_config
from pipelines.run.iteration import NotDone
from pipelines.run.run import Run
from pipelines.run.scoring import rewards_for
from pipelines.stages.score import score
from serve_apps.episode.runner import WORKFLOW_RAISED
from stores.journal.stage_results import Scored
from stores.types import SERVED, SOUND, Cause, EpisodeRewards, EpisodeStatus, Purpose, Trace

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
FAILED = [status for status in EpisodeStatus if status not in SOUND]


def of_group(trace: Trace) -> Trace:
    """The episode, played by the one model group of the config."""
    return replace(trace, turns=tuple(replace(turn, model_group="team") for turn in trace.turns))


def scored(folder: Path, make: Callable[[dict[str, Any]], list[Trace]]) -> tuple[Scored, dict[str, EpisodeRewards]]:
    run = Run(load_config(SMALL, {"storage.root": str(folder)}))
    run.open()
    where = {"run_id": run.run_id, "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
    run.traces.write_episodes([of_group(trace) for trace in make(where)])
    pinned = run.traces.pin_episodes(**where)
    finish(
        run, 1, collected(traces=pinned, policy_versions={"team": 1})
    )  # one that has learnt: see the cases of version 0
    result = score(call(run, "score", 1))
    return result, {rewards.episode_id: rewards for rewards in run.traces.read_rewards(result.rewards)}


def test_episodes_are_paid_that_did_not_fail_or_whose_failure_the_policy_caused(
    make_trace: MakeTrace, tmp_path: Path
) -> None:
    ends = [*((status, Cause.NONE) for status in SOUND), *product(FAILED, [c for c in Cause if c])]
    traces: list[Trace] = []

    def make(where: dict[str, Any]) -> list[Trace]:
        traces.extend(make_trace(i, **where, status=s, cause=c) for i, (s, c) in enumerate(ends))
        return traces

    result, rewards = scored(tmp_path, make)
    assert {t.episode_id for t in traces if t.cause in (Cause.NONE, Cause.POLICY)} == rewards.keys()
    assert result.causes == {"sound": 2, "policy": 4, "infrastructure": 4, "author": 4}
    worst = [rewards[t.episode_id] for t in traces if t.cause is Cause.POLICY]
    assert {r.outcome for r in worst} == {0.0} and all(len(r.rewards) == 2 for r in worst), "the turns that were played"


@pytest.mark.parametrize(
    ("change", "is_authors"),
    [
        (lambda i, t: t, True),
        (lambda i, t: replace(t, error=f"KeyError: <a.Box object at 0x7f3a1c2d3{i}40>"), True),
        (lambda i, t: replace(t, error=f"no file /tmp/{i}e8400b2-e29b-41d4-a716-44665544000a"), True),
        (lambda i, t: replace(t, error=f"gave up after {i}.3s, at 1.{i}e-0{i}"), True),
        (lambda i, t: replace(t, turns=t.turns if i else ()), True),
        (lambda i, t: replace(t, turns=()), False),  # nothing shows that another completion would fail, too
        (lambda i, t: replace(t, error="KeyError: other") if i else t, False),
        (lambda i, t: replace(t, status=EpisodeStatus.OK, cause=Cause.NONE) if i else t, False),
        (lambda i, t: replace(t, stop_reason="tool_refused"), False),
        (lambda i, t: replace(t, cause=Cause.INFRASTRUCTURE) if i else t, False),
    ],
)
def test_a_task_whose_episodes_all_fail_alike_whatever_was_sampled_is_an_authors_fault_and_not_paid(
    make_trace: MakeTrace, tmp_path: Path, change: Callable[[int, Trace], Trace], is_authors: bool
) -> None:
    def make(where: dict[str, Any]) -> list[Trace]:
        group = [make_trace(i, **where, **FAULT, error=f"KeyError: 'x' at line {i}") for i in range(2)]
        said = [replace(t, turns=(replace(t.turns[0], completion_text=f"text {i}"),)) for i, t in enumerate(group)]
        return [change(i, trace) for i, trace in enumerate(said)]

    result, rewards = scored(tmp_path, make)
    assert (result.causes == {"author": 2}) == is_authors
    if is_authors:
        assert rewards == {}


FAULT = {"status": EpisodeStatus.AGENT_ERROR, "cause": Cause.POLICY, "stop_reason": WORKFLOW_RAISED}


@pytest.mark.parametrize(
    ("raised", "other", "num_authors"),
    [
        ({}, {}, 0),  # the same error, beside an episode that raised none
        ({}, {"status": EpisodeStatus.TOOL_ERROR, "cause": Cause.POLICY, "stop_reason": "tool_refused"}, 0),
        ({}, {"status": EpisodeStatus.TIMEOUT, "cause": Cause.INFRASTRUCTURE, "stop_reason": "timeout"}, 2),
        ({"error": "ValueError: another"}, {}, 2),
        ({"cause": Cause.INFRASTRUCTURE}, {}, 2),
        ({"stop_reason": "tool_raised"}, {}, 2),
    ],
)
def test_an_error_beside_which_a_sibling_raised_none_is_the_policys_in_every_group(
    make_trace: MakeTrace, tmp_path: Path, raised: dict[str, Any], other: dict[str, Any], num_authors: int
) -> None:
    def make(where: dict[str, Any]) -> list[Trace]:
        traces = [make_trace(i, **where, **FAULT, error=f"KeyError: 'x' at line {i}") for i in range(2)]
        traces += [make_trace(2, **where, **(FAULT | {"error": "KeyError: 'x' at line 7"} | raised))]
        traces += [make_trace(3, **where, **other)]
        groups = ["one", "one", "two", "two"]
        said = [replace(t.turns[0], completion_text=f"text {i}") for i, t in enumerate(traces)]
        return [replace(t, group_id=g, turns=(s,)) for t, g, s in zip(traces, groups, said, strict=True)]

    result, rewards = scored(tmp_path, make)
    assert result.causes.get("author", 0) == num_authors
    assert len(rewards) == sum(result.causes.get(cause, 0) for cause in ("sound", "policy"))


@pytest.mark.parametrize(("num_own", "outcome"), [(4, 0.0), (0, None)])
def test_answers_that_callers_judged_are_paid_and_are_not_among_the_figures(
    make_trace: MakeTrace, tmp_path: Path, num_own: int, outcome: float | None
) -> None:
    def make(where: dict[str, Any]) -> list[Trace]:
        own = [make_trace(i, **where, answer="wrong") for i in range(num_own)]
        served = [make_trace(4 + i, **where, outcome_metadata={SERVED: {"score": 1.0}}) for i in range(4)]
        return [*own, *served]

    result, rewards = scored(tmp_path, make)
    assert sorted(reward.outcome for reward in rewards.values()) == [0.0] * num_own + [1.0] * 4
    assert result.outcome == outcome and bool(result.agents) is bool(num_own)


def scored_run(traces: Sequence[Trace], root: Path) -> Run:
    run = Run(load_config(SMALL, {"storage.root": str(root)}))
    run.open()
    where = {"run_id": run.run_id, "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
    run.traces.write_episodes([of_group(replace(trace, **where)) for trace in traces])
    statuses = dict(Counter(trace.status.value for trace in traces))
    finish(run, 1, collected(traces=run.traces.pin_episodes(**where), statuses=statuses))
    return run


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cost": {"at_most": 1.0}}, {"cost": {"at_most": 1.0, "initial": 2.0}}),
        ({}, {"cost": {"at_most": 1.0, "initial": 2.0}}),
    ],
)
def test_a_run_with_costs_that_trains_on_anothers_traces_in_a_shared_store_has_rewards_of_its_own(
    make_trace: MakeTrace, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    shared = {"storage.root": str(tmp_path), "storage.traces": str(tmp_path / "shared")}
    owner, other = (
        Run(load_config(SMALL, shared | {"run": name} | changes)) for name, changes in (("a", first), ("b", second))
    )
    owner.open()
    other.open()
    where = {"run_id": "a", "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
    owner.traces.write_episodes([trace := of_group(make_trace(0, **where))])
    paid = []
    for run in (owner, other):
        finish(run, 1, collected(traces=run.traces.pin_episodes(**where), policy_versions={"team": 1}))
        result = score(call(run, "score", 1))
        assert score(call(run, "score", 1)) == result
        paid.append(list(run.traces.read_rewards(result.rewards)))
        assert rewards_for(run, trace) == paid[-1][0], "what is shown is what was trained on"
    ((mine,), (theirs,)) = paid
    assert mine.outcome == theirs.outcome
    assert all(b.reward < a.reward for a, b in zip(mine.rewards, theirs.rewards, strict=True))
    assert rewards_for(owner, trace) == mine


def test_stored_rewards_name_run_and_iteration(tmp_path: Path) -> None:
    runs = [Run(load_config(SMALL, {"storage.root": str(tmp_path), "run": name})) for name in ("a", "b")]
    assert len({run.credit_version for run in runs}) == 1
    assert len({run.scored_version(iteration) for run in runs for iteration in (1, 2)}) == 4


def emptied(trace: Trace) -> Trace:
    turns = tuple(replace(turn, completion_token_ids=(), rollout_logprobs=()) for turn in trace.turns)
    return replace(trace, turns=turns)


def mixed(trace: Trace) -> Trace:
    return replace(trace, turns=tuple(replace(turn, is_version_mixed=True) for turn in trace.turns))


def as_it_is(trace: Trace) -> Trace:
    return trace


@pytest.mark.parametrize(
    ("status", "change", "said"),
    [
        (
            EpisodeStatus.AGENT_ERROR,
            as_it_is,
            r"no episode that counts has a turn\. Episodes: 2 agent_error\. To mend it, look at",
        ),
        (
            EpisodeStatus.TRUNCATED,
            mixed,
            r"more than one policy version sampled each episode that counts\. Episodes: 2 truncated",
        ),
        (EpisodeStatus.OK, emptied, "every completion of the episodes that count is empty"),
    ],
)
def test_score_fails_where_nothing_could_ever_be_trained(
    make_trace: Callable[..., Trace], tmp_path: Path, status: EpisodeStatus, change: Callable[[Trace], Trace], said: str
) -> None:
    traces = [make_trace(i, status=status) for i in range(2)]
    run = scored_run([change(trace) for trace in traces], tmp_path)
    with pytest.raises(ValueError, match=rf"iteration 1: nothing can be trained: {said}"):
        score(call(run, "score", 1))


def test_one_episode_that_trains_is_enough(make_trace: Callable[..., Trace], tmp_path: Path) -> None:
    traces = [make_trace(i, status=status) for i, status in enumerate([EpisodeStatus.AGENT_ERROR, EpisodeStatus.OK])]
    assert score(call(scored_run(traces, tmp_path), "score", 1)).agents


def test_where_iterations_overlap_score_goes_on_from_the_one_before_and_only_the_first_may_be_hopeless(
    make_trace: Callable[..., Trace], tmp_path: Path
) -> None:
    run = scored_run([emptied(make_trace(i)) for i in range(2)], tmp_path)
    late = Run(load_config(SMALL, {"storage.root": str(tmp_path / "late"), "loop.max_lag": 1}))
    late.open()
    late.traces.write_episodes(
        [replace(of_group(emptied(make_trace(0))), run_id=late.run_id, iteration=2, team_key="team")]
    )
    where = {"run_id": late.run_id, "iteration": 2, "purpose": Purpose.TRAIN, "team_key": "team"}
    finish(late, 2, collected(traces=late.traces.pin_episodes(**where)))
    with pytest.raises(NotDone, match=r"score of iteration 1 of run .* needs score"):
        score(call(late, "score", 2))
    finish(late, 1, scored_result())
    assert score(call(late, "score", 2)).agents, "an iteration before it has learnt"
    with pytest.raises(ValueError, match="nothing can be trained"):
        score(call(run, "score", 1))


def run_of(folder: Path, make_trace: MakeTrace, *, num_iterations: int, **changes: Any) -> Run:
    """A run of which so many iterations have collected two episodes of 4 and 8 completion tokens each."""
    run = Run(load_config(SMALL, {"storage.root": str(folder), **changes}))
    run.open()
    for iteration in range(1, num_iterations + 1):
        where = {"run_id": run.run_id, "iteration": iteration, "purpose": Purpose.TRAIN, "team_key": "team"}
        run.traces.write_episodes([of_group(make_trace(i, **where)) for i in range(2)])
        pinned = run.traces.pin_episodes(**where)
        finish(run, iteration, collected(traces=pinned, policy_versions={"team": iteration}))
    return run


def test_the_multiplier_that_an_iteration_leaves_is_charged_in_the_next_one_that_is_scored(
    make_trace: MakeTrace, tmp_path: Path
) -> None:
    run = run_of(tmp_path, make_trace, num_iterations=4, cost={"at_most": 1, "initial": 0.25, "rate": 0.5})
    multiplier = 0.25
    for iteration in (1, 2, 4):  # the third is collected, and not scored yet
        result = score(call(run, "score", iteration))
        finish(run, iteration, result)
        assert result.cost is not None and result.cost["multiplier"] == multiplier < result.cost["next_multiplier"]
        parts = [part for episode in run.traces.read_rewards(result.rewards) for part in episode.rewards]
        assert min(part.breakdown["cost"] for part in parts) == pytest.approx(-14 * multiplier), "14 tokens are dearest"
        multiplier = result.cost["next_multiplier"]
