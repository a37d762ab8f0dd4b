"""`troupe show --run RUN`: stored episodes by their properties, the newest first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from pipelines.report.inspect import list_episodes, list_view, show_command
from stores.traces.served import ServedStore
from stores.traces.store import TraceStore
from stores.types import EpisodeRewards, EpisodeStatus, Purpose, Trace

pytestmark = pytest.mark.test


@pytest.fixture
def run(tmp_path: Path, make_trace: Callable[..., Trace], make_rewards: Callable[..., EpisodeRewards]) -> Any:
    """A run of two iterations with six episodes each, of which every second one is right, and one that callers were given."""
    store = TraceStore(str(tmp_path / "traces"))
    store.create()
    for iteration in (1, 2):
        traces = [
            replace(
                make_trace(i), iteration=iteration, episode_id=f"{iteration:04x}{i}", started_at=100.0 * iteration + i
            )
            for i in range(6)
        ]
        late = replace(traces[5], status=EpisodeStatus.TIMEOUT, purpose=Purpose.GATE, turns=traces[5].turns[:1])
        store.write_episodes([*traces[:5], late])
        store.write_rewards([make_rewards(trace, outcome=float(trace.started_at % 2)) for trace in traces[:5]])
    served = ServedStore(str(tmp_path / "served"))
    served.create()
    served.write_episodes([replace(make_trace(0), episode_id="served", run_id="service", answer="to a caller")])
    return SimpleNamespace(
        run_id="run",
        traces=store,
        served_uri=served.uri,
        credit_version="c1",
        scored_version=lambda iteration: None,
        config=SimpleNamespace(
            iterations=2, group_of={"solver": "g", "verifier": "g"}, storage=SimpleNamespace(root="runs")
        ),
    )


def ids(listed: dict[str, Any]) -> list[str]:
    return [row["episode_id"] for row in listed["episodes"]]


def test_the_newest_come_first_and_what_is_left_out_is_counted(run: Any) -> None:
    listed = list_episodes(run, limit=7)
    assert ids(listed) == ["00025", "00024", "00023", "00022", "00021", "00020", "00015"]
    assert listed["num_left_out"] == 5
    assert [row["outcome"] for row in listed["episodes"][:3]] == [None, 0.0, 1.0]
    assert "5 older ones are left out: raise --limit" in shown(listed)


def test_outcomes_of_a_rule_that_has_changed_since_are_shown_where_there_are_no_others(run: Any) -> None:
    run.credit_version = "changed"
    assert [row["outcome"] for row in list_episodes(run, limit=3)["episodes"]] == [None, 0.0, 1.0]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"iteration": 1, "outcomes": (None, 0.5)}, ["00014", "00012", "00010"]),
        ({"iteration": 1, "outcomes": (0.5, None)}, ["00013", "00011"]),
        ({"iteration": 1, "outcomes": (0.5, 0.9)}, []),
        ({"status": EpisodeStatus.TIMEOUT}, ["00025", "00015"]),
        ({"purpose": Purpose.GATE, "iteration": 2}, ["00025"]),
        ({"agent": "verifier", "iteration": 1}, ["00014", "00013", "00012", "00011", "00010"]),
        ({"task_id": "t9"}, []),
    ],
)
def test_episodes_are_found_by_what_they_are(run: Any, asked: dict[str, Any], expected: list[str]) -> None:
    listed = list_episodes(run, limit=20, **asked)
    assert ids(listed) == expected and listed["num_left_out"] == 0
    assert shown(listed) if expected else "no stored episode is like this" in shown(listed)


def test_an_agent_that_the_run_does_not_have_is_refused_with_the_nearest_one(run: Any) -> None:
    with pytest.raises(ValueError, match=r"--agent 'sovler' is no agent of run 'run': did you mean 'solver'\?"):
        list_episodes(run, limit=5, agent="sovler")


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (math.nan, None), (math.inf, None), (None, -math.inf)])
def test_bounds_between_which_there_is_no_number_are_refused(
    run: Any, bounds: tuple[float | None, float | None]
) -> None:
    with pytest.raises(ValueError, match=r"outcomes between .*: name finite numbers, --min-outcome the lower one"):
        list_episodes(run, limit=5, outcomes=bounds)


@pytest.mark.parametrize("answer", ["The capital of France is Paris. " * 3, "日本語の答え" * 9])
def test_long_texts_take_no_room_from_the_facts_of_a_narrow_terminal(run: Any, answer: str) -> None:
    listed = list_episodes(run, limit=1)
    listed["episodes"][0] |= {"answer": answer, "task_prompt": "Which city? " * 9, "task_id": "ab/" * 30}
    row = next(line for line in shown(listed, width=80).splitlines() if "00025" in line)
    assert row.split()[:5] == ["00025", "2", "gate", "–", "timeout"] and cell_len(row) <= 80


def test_what_callers_were_given_is_listed_from_its_own_store(run: Any) -> None:
    listed = list_episodes(run, limit=5, is_served=True)
    assert ids(listed) == ["served"] and "to a caller" in shown(listed)


def test_an_unknown_id_says_how_to_list_and_the_command_names_the_folder(run: Any) -> None:
    with pytest.raises(
        ValueError, match=r"no episode 'foo' in .*: `troupe show --run run` lists those that are stored"
    ):
        run.traces.get_trace("foo", run_id="run")
    assert show_command(run, "0002" + "5" * 28) == "troupe show 000255555555 --run run"
    run.config.storage.root = "my runs"
    assert show_command(run) == "troupe show --run run --root 'my runs'"


def shown(listed: dict[str, Any], *, width: int = 200) -> str:
    console = Console(record=True, width=width)
    console.print(list_view(listed))
    return console.export_text()
