"""One controller on a simulated engine: the real collector, runner, recorder, tokenizer and store; only tokens are canned.

python -m tests.bench.simulated_controller MODEL_FOLDER STORE_FOLDER SEED NUM_EPISODES IN_FLIGHT
prints a line `@@peer {...}` with seconds, ideal seconds, peak in flight, and memory per wave of IN_FLIGHT episodes
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import pickle
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config.run_config import load_config
from pipelines.episodes.collector import Collector, EarlyStop, Writer
from pipelines.examples.arithmetic.tasks import generate
from pipelines.run.run import Run
from serve_apps.chat.tokenizer import load_tokenizer
from serve_apps.config import CallConfig
from serve_apps.episode.team import TeamSpec
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import CallCounts, CountingClient
from stores.logs import carry
from stores.traces.store import TraceStore
from stores.types import Completion, FinishReason, GenerateRequest, Purpose
from tests.bench.peer import MARK
from tests.bench.setting import DEMO

LATENCY_S = (0.2, 2.0)
SAID = (
    "<SOLUTION>3*4=12;12+12=24</SOLUTION><ANSWER>24</ANSWER>",
    "<STATUS>incorrect</STATUS><ERROR_TYPE>reasoning</ERROR_TYPE><FEEDBACK>multiply first</FEEDBACK>",
    "<REFINED_SOLUTION>3*4=12;12+12=24</REFINED_SOLUTION><ANSWER>24</ANSWER>",
    "<FINAL_SOLUTION>3*4=12;12+12=24</FINAL_SOLUTION><FINAL_ANSWER>24</FINAL_ANSWER>",
)
"""What the chain's four agents say."""


class SimulatedEngine:
    """Answers after 0.2 to 2 s, however many ask at once."""

    counts = CallCounts()

    def __init__(self, folder: str) -> None:
        tokenizer = load_tokenizer(folder)
        self._ids = [tokenizer.encode_completion(text) for text in SAID]
        self._open: set[str] = set()
        self.peak = 0
        self.latencies: dict[str, float] = {}
        """By episode: the sum of its calls'."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """The canned completion of the request's turn."""
        episode, _, turn = request.request_id.rpartition("-")
        self._open.add(episode)
        self.peak = max(self.peak, len(self._open))
        latency = random.Random(request.seed).uniform(*LATENCY_S)
        self.latencies[episode] = self.latencies.get(episode, 0.0) + latency
        await asyncio.sleep(latency)
        ids = self._ids[int(turn)]
        if int(turn) == len(SAID) - 1:
            self._open.discard(episode)
        return Completion(token_ids=ids, logprobs=[-0.1] * len(ids), finish_reason=FinishReason.STOP, policy_version=0)


class SimulatedCollector(Collector):
    """A collector whose policy apps are the simulated engine."""

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__()
        self._engine = engine

    def client(self, apps: Mapping[str, str], call: CallConfig, capacity: Mapping[str, int]) -> CountingClient:
        """The engine, without Serve in between."""
        return self._engine


def main() -> None:
    """Runs the episodes and prints what was measured."""
    folder, store_folder = sys.argv[1], sys.argv[2]
    seed, num_episodes, in_flight = map(int, sys.argv[3:6])
    config = load_config(DEMO)
    run = Run(config)
    group_of = dict.fromkeys(run.workflow.agents, "team")
    team_spec = TeamSpec(
        workflow=config.workflow.path,
        settings=dict(config.workflow.settings),
        group_of=group_of,
        tokenizers={"team": folder},
        max_model_len={"team": 512},
        sampling={name: run.sampling(name, agent) for name, agent in run.workflow.agents.items()},
        policy_versions={"team": 0},
        team_key="team",
        limits=config.collect.episode,
    )
    tasks = generate(seed=seed, split="train", count=500, max_a=49, max_factor=6)
    store = TraceStore(store_folder)
    store.create()
    engine = SimulatedEngine(folder)

    def specs(iteration: int, count: int) -> list[EpisodeSpec]:
        key: dict[str, Any] = {"run_id": f"run-{seed}", "iteration": iteration, "purpose": Purpose.TRAIN}
        return [
            EpisodeSpec(**key, team_key="team", task=tasks[i % 500], episode_index=i // 500, run_seed=seed)
            for i in range(count)
        ]

    async def collect(iteration: int, count: int) -> list[float]:
        """Memory in MB each time another `in_flight` episodes are stored."""
        num_stored = 0
        memory: list[float] = []
        collector, writer, target = SimulatedCollector(engine), Writer(), pickle.dumps((store, ()))
        blocks = collector.run(
            specs(iteration, count),
            pass_id="bench",
            team_spec=team_spec,
            apps={},
            store=store,
            config=config.collect.model_copy(update={"num_workers": 1, "episodes_in_flight": in_flight}),
            capacity={},
            place=0,
            log=carry(),
            early_stop=EarlyStop(),
        )
        async for block in blocks:
            row = block.drop_columns(["episodes"]).to_pylist()[0]
            assert set(json.loads(row["statuses"])) <= {"ok"}, row
            if row["num"]:
                await asyncio.to_thread(writer.write, block["episodes"].combine_chunks(), target)
                await collector.stored("bench", row["name"])
            num_stored += row["num"]
            if num_stored >= in_flight * (len(memory) + 1):
                memory.append(_resident_mb())
        return memory

    asyncio.run(collect(0, 8))  # imports and first uses
    engine.latencies.clear()
    engine.peak = 0
    # Interpreters are ready: with several controllers all begin together.
    print(MARK + json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    began, cpu = time.perf_counter(), time.process_time()
    memory = asyncio.run(collect(1, num_episodes))
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    ideal = _ideal_seconds([engine.latencies[spec.episode_id] for spec in specs(1, num_episodes)], in_flight)
    answer = {"seconds": seconds, "ideal_s": ideal, "cpu_s": cpu_s, "peak": engine.peak, "memory_mb": memory}
    print(MARK + json.dumps(answer), flush=True)


def _ideal_seconds(durations: list[float], in_flight: int) -> float:
    """When the last episode ends if only the latencies take time and `in_flight` run at once, in order."""
    ends: list[float] = []
    for duration in durations:
        start = heapq.heappop(ends) if len(ends) == in_flight else 0.0
        heapq.heappush(ends, start + duration)
    return max(ends)


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
