"""When a sampling pass has enough, and which groups it leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipelines.config.sections import BudgetConfig
from pipelines.episodes.groups import Groups
from pipelines.episodes.sampling import _to_repeat
from serve_apps.episode.causes import covered
from serve_apps.episode_spec import EpisodeSpec
from stores.types import Purpose, Task

pytestmark = pytest.mark.fast

SIZE = 3


def specs(num_tasks: int = 4) -> list[EpisodeSpec]:
    key: dict[str, Any] = {"run_id": "r", "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "t", "run_seed": 0}
    tasks = [Task(task_id=f"t{i}", prompt="1+1", answers=("2",)) for i in range(num_tasks)]
    return [EpisodeSpec(**key, task=task, episode_index=i) for task in tasks for i in range(SIZE)]


def table(episodes: list[EpisodeSpec], *, tokens: int = 10) -> pa.Table:
    """These episodes as stored, each a second long, one after another."""
    return pa.table(
        {
            "episode_id": pa.array([spec.episode_id for spec in episodes], pa.string()),
            "group_id": pa.array([spec.group_id for spec in episodes], pa.string()),
            "started_at": pa.array([float(i) for i in range(len(episodes))], pa.float64()),
            "duration_s": pa.array([1.0] * len(episodes), pa.float64()),
            "num_tokens": pa.array([tokens] * len(episodes), pa.int64()),
        }
    )


def groups(stored: list[EpisodeSpec], *, num_enough: int | None = None, **budget: Any) -> Groups:
    return Groups(specs(), table(stored), num_enough=num_enough, budget=BudgetConfig(**budget))


def test_without_a_limit_every_group_is_wanted_whatever_it_costs() -> None:
    found = groups(specs()[:4], tokens=1, seconds=0.1)
    assert found.stopped_by(1e6) is None
    assert not found.may_stop
    assert len(found.left_out) == 3 and found.num_episodes_left == 8


def test_a_pass_has_enough_once_so_many_groups_are_complete() -> None:
    found = groups(specs()[:5], num_enough=2)
    assert found.stopped_by(0) is None and found.num_episodes_left == 1, "what it will drop takes no time"
    found.add({specs()[5].group_id: 1}, 10)
    assert found.stopped_by(0) == "enough"
    assert found.complete == {specs()[0].group_id, specs()[3].group_id}
    assert [found.task_of[group] for group in found.left_out] == ["t2", "t3"]


def test_a_pass_whose_groups_are_all_complete_was_stopped_by_nothing() -> None:
    assert groups(specs(), num_enough=4, tokens=1).stopped_by(1e6) is None


@pytest.mark.parametrize(("tokens", "reason"), [(50, "tokens"), (51, None)])
def test_tokens_of_stored_episodes_count_towards_the_budget(tokens: int, reason: str | None) -> None:
    assert groups(specs()[:5], num_enough=4, tokens=tokens).stopped_by(0) == reason


def test_seconds_of_earlier_passes_count_and_the_pause_between_them_does_not() -> None:
    found = groups(specs()[:5], num_enough=4, seconds=8)
    assert found.seconds_left == 3
    assert found.stopped_by(2.9) is None
    assert found.stopped_by(3) == "seconds"


def test_what_is_stored_of_a_group_says_that_it_has_begun() -> None:
    assert groups(specs()[:4], num_enough=4).begun == {specs()[0].group_id, specs()[3].group_id}


def test_episodes_of_other_tasks_under_the_same_key_do_not_count() -> None:
    found = Groups(specs(2), table(specs(4)), num_enough=None, budget=BudgetConfig())
    assert len(found.complete) == 2
    assert found.left_out == []


def test_a_pass_may_play_more_episodes_of_a_group_that_another_pass_completed() -> None:
    before, here = specs(1)[:2], specs(1)[2:]
    found = Groups(here, table([*before, *here]), num_enough=None, budget=BudgetConfig())
    assert found.complete == {here[0].group_id}
    assert Groups(here, table(before), num_enough=None, budget=BudgetConfig()).left_out == [here[0].group_id]


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(0, 2), (1, 3)], 3), ([(5, 6), (0, 1)], 2), ([(0, 9), (1, 2), (8, 10)], 10)],
)
def test_time_that_two_episodes_share_counts_once(spans: list[tuple[float, float]], length: float) -> None:
    assert covered(spans) == length


def test_failures_of_other_passes_under_the_same_key_repeat_nothing_here() -> None:
    before, here = specs(4)[:9], specs(4)[9:]
    stored = pa.table(
        {
            "episode_id": [spec.episode_id for spec in [*before, here[0]]],
            "group_id": [spec.group_id for spec in [*before, here[0]]],
            "status": ["timeout"] * 4 + ["ok"] * 5 + ["timeout"],
            "cause": ["infrastructure"] * 4 + [""] * 5 + ["author"],
            "stop_reason": [""] * 10,
            "error": [""] * 10,
            "started_at": [0.0] * 10,
            "duration_s": [1.0] * 10,
        }
    )
    one_pass = Groups(here, stored, num_enough=None, budget=BudgetConfig())
    store: Any = SimpleNamespace(completions_of=lambda ids: {})
    assert _to_repeat(stored, one_pass, store=store, limit=0.4) == [], "1 of 3 failed"
    assert _to_repeat(stored, one_pass, store=store, limit=0.3) == [here[0].episode_id]


def test_a_task_that_failed_whatever_was_sampled_is_played_again_and_other_failures_of_the_policy_are_not() -> None:
    planned = specs(2)
    tasks = [spec.task.task_id for spec in planned]
    first = [spec for spec in planned if spec.task.task_id == tasks[0]]
    stored = pa.table(
        {
            "episode_id": [spec.episode_id for spec in planned],
            "group_id": [spec.group_id for spec in planned],
            "status": ["agent_error"] * len(planned),
            "cause": ["policy"] * len(planned),
            "stop_reason": ["workflow_raised" if spec in first else "tool_refused" for spec in planned],
            "error": ["KeyError: 'x'"] * len(planned),
            "started_at": [0.0] * len(planned),
            "duration_s": [1.0] * len(planned),
        }
    )
    store: Any = SimpleNamespace(completions_of=lambda ids: {e: (e,) for e in ids})
    one_pass = Groups(planned, stored, num_enough=None, budget=BudgetConfig())
    assert _to_repeat(stored, one_pass, store=store, limit=0.1) == [spec.episode_id for spec in first]
