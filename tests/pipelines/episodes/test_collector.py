"""What one collector holds in memory, and what becomes of a pass that its caller has left."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.config.sections import CollectConfig
from pipelines.episodes import collector as module
from pipelines.episodes.collector import MAX_UNSTORED, Collector, EarlyStop, Writer
from serve_apps.config import CallConfig, EpisodeConfig
from serve_apps.episode.team import TeamSpec
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import CallCounts, CountingClient
from stores.traces.store import TraceStore
from stores.types import Completion, FinishReason, GenerateRequest, Purpose, Sampling, Task

pytestmark = pytest.mark.test

IN_FLIGHT = 16
WHERE: dict[str, Any] = {"run_id": "run", "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}


class AtOnce:
    """Answers every call in the next turn of the event loop."""

    counts = CallCounts()

    def __init__(self) -> None:
        self.num_asked = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Five tokens."""
        self.num_asked += 1
        await asyncio.sleep(0)
        return Completion(token_ids=[1] * 5, logprobs=[-0.5] * 5, finish_reason=FinishReason.STOP, policy_version=0)


class OfAtOnce(Collector):
    """A collector without engines."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = AtOnce()

    def client(self, apps: Mapping[str, str], call: CallConfig, capacity: Mapping[str, int]) -> CountingClient:
        """The one that answers at once."""
        return self.engine


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    store = TraceStore(str(tmp_path / "traces"))
    store.create()
    store.begin(run_id="run", iteration=1)
    return store


def blocks(collector: Collector, store: TraceStore, tiny_model: Path, count: int) -> Any:
    """The blocks of a pass of so many episodes, in groups of 4."""
    tasks = [Task(task_id=f"t{i}", prompt=f"{i} + {i}", answers=(str(2 * i),)) for i in range(count // 4)]
    return collector.run(
        [EpisodeSpec(**WHERE, task=task, episode_index=index, run_seed=0) for task in tasks for index in range(4)],
        pass_id="pass",
        team_spec=TeamSpec(
            workflow="one_call:OneCall",
            settings={},
            group_of={"solver": "team"},
            tokenizers={"team": str(tiny_model)},
            max_model_len={"team": 256},
            sampling={"solver": Sampling(max_tokens=8)},
            policy_versions={"team": 0},
            team_key="team",
            limits=EpisodeConfig(max_attempts=1),
        ),
        apps={},
        capacity={},
        store=store,
        config=CollectConfig(num_workers=1, episodes_in_flight=IN_FLIGHT),
        place=0,
        log={},
        early_stop=EarlyStop(),
    )


def test_a_store_that_takes_seconds_bounds_the_episodes_that_wait_for_it(store: TraceStore, tiny_model: Path) -> None:
    collector, writer = OfAtOnce(), Writer()

    async def collect() -> list[int]:
        num_stored, waiting = 0, []
        async for block in blocks(collector, store, tiny_model, 800):
            await asyncio.sleep(0.4)  # a commit
            waiting.append(collector.engine.num_asked - num_stored)
            if num := block["num"][0].as_py():
                writer.write(block["episodes"].combine_chunks(), pickle.dumps((store, ())))
                num_stored += num
                await collector.stored("pass", block["name"][0].as_py())
        return waiting

    waiting = asyncio.run(collect())
    assert MAX_UNSTORED / 2 < max(waiting) <= MAX_UNSTORED + IN_FLIGHT
    assert len(store.stored_episodes(**WHERE)) == 800
    assert len(waiting) < 20, "a slow store gets large blocks"


def test_a_pass_that_its_caller_has_left_plays_nothing_more_and_holds_nothing(
    store: TraceStore, tiny_model: Path
) -> None:
    collector = OfAtOnce()

    async def leave() -> list[int]:
        run = blocks(collector, store, tiny_model, 2000)
        assert (await anext(run))["num"][0].as_py() > 0
        await asyncio.sleep(0.5)
        before = collector.engine.num_asked
        await collector.forget("pass")
        await collector.stored("pass", "of another collector")
        rest = [block["num"][0].as_py() async for block in run]
        return [before, collector.engine.num_asked, *rest]

    before, after, *_ = asyncio.run(leave())
    assert before == after <= MAX_UNSTORED + IN_FLIGHT < 2000


def test_a_block_of_a_collector_that_was_replaced_makes_no_room(store: TraceStore, tiny_model: Path) -> None:
    playing = module._Pass(EarlyStop(), in_flight=1, log={}, place=0)
    playing.stored("unknown")
    assert playing.rooms._value == 1 + MAX_UNSTORED and playing.all_stored.is_set()


def test_a_pulse_has_the_columns_of_a_block() -> None:
    pulse = pa.table(module._carried([]))
    assert pulse["episodes"].to_pylist() == [[]] and pulse["num"].to_pylist() == [0]
