"""traces: rows per second through the trace store, beside plain Parquet files of the same rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow.parquet as pq

from stores.traces.rows import episode_table, traces_of
from stores.traces.store import TraceStore
from stores.types import Purpose, Task, Trace, Turn
from tests.bench.figures import Figure, ratio
from tests.records import build_trace, build_turn

NUM_EPISODES = 2048
BATCH = 128
"""Episodes per write, as `collect` writes them."""
KEY = {"run_id": "bench", "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}

T = TypeVar("T")


def measure(folder: Path) -> list[Figure]:
    """Both write record by record batches; both are read back as Arrow batches and as records."""
    traces = _traces()
    batches = [traces[i : i + BATCH] for i in range(0, len(traces), BATCH)]
    store = TraceStore(str(folder / "lance"))
    store.create()
    store.write_episodes(_traces(num=1, first=10**6))  # the first write loads the library
    parquet = folder / "parquet"
    parquet.mkdir()

    def write_parquet() -> None:
        for i, batch in enumerate(batches):
            pq.write_table(episode_table(batch), parquet / f"{i}.parquet")

    def write_store() -> None:
        for batch in batches:
            store.write_episodes(batch)

    write_s = {"parquet": _seconds(write_parquet)[0], "store": _seconds(write_store)[0]}
    pin_s, ref = _seconds(lambda: store.pin_episodes(**KEY))  # type: ignore[arg-type]
    files = sorted(parquet.iterdir())
    arrow_s = {
        "store": _seconds(lambda: sum(b.num_rows for b in store.read_batches(ref)))[0],
        "parquet": _seconds(lambda: sum(b.num_rows for f in files for b in pq.read_table(f).to_batches()))[0],
    }
    records_s = {
        "store": _seconds(lambda: list(store.read_traces(ref)))[0],
        "parquet": _seconds(lambda: [t for f in files for b in pq.read_table(f).to_batches() for t in traces_of(b)])[0],
    }
    rows = f"{NUM_EPISODES} episodes of 4 turns"
    figures = []
    for what, seconds in (("write", write_s), ("read Arrow", arrow_s), ("read records", records_s)):
        ours, peer = NUM_EPISODES / seconds["store"], NUM_EPISODES / seconds["parquet"]
        figures.append(Figure(f"{what}, LanceDB", ours, "rows/s", note=rows))
        figures.append(Figure(f"{what}, Parquet", peer, "rows/s"))
        figures.append(ratio(f"{what}, LanceDB / Parquet", ours, peer))
    figures.append(Figure("pin a version", pin_s, "s", note="uniqueness check and tag"))
    return figures


def _seconds(work: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _traces(num: int = NUM_EPISODES, first: int = 0) -> list[Trace]:
    random = np.random.default_rng(first)
    return [_trace(first + i, random) for i in range(num)]


def _trace(number: int, random: np.random.Generator) -> Trace:
    return build_trace(
        episode_id=f"{number:032x}",
        run_id="bench",
        iteration=1,
        task=Task(task_id=f"task-{number // 8}", prompt="What is 12+3*4?", answers=("24",)),
        group_id=f"group-{number // 8}",
        episode_index=number % 8,
        seed=number,
        answer="24",
        outcome_metadata={},
        policy_versions={"team": 1},
        turns=tuple(_turn(i, random) for i in range(4)),
        tool_calls=(),
    )


def _turn(index: int, random: np.random.Generator) -> Turn:
    completion = int(random.integers(20, 60))
    return build_turn(
        index,
        ("solver", "verifier", "refiner", "finalizer")[index],
        "team",
        policy_version=1,
        prompt_text="Solve the problem step by step. " * 6,
        completion_text="<SOLUTION>3*4=12;12+12=24</SOLUTION><ANSWER>24</ANSWER>",
        prompt_token_ids=tuple(random.integers(0, 32_000, 80).tolist()),
        completion_token_ids=tuple(random.integers(0, 32_000, completion).tolist()),
        rollout_logprobs=tuple(random.standard_normal(completion).astype(np.float32).tolist()),
        fields={"solution": "3*4=12;12+12=24", "answer": "24"},
    )
