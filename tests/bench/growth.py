"""growth: what an iteration costs beside sampling and training at iteration 10, 100 and 1,000 of one run.

    iterations 1 to 9 ── filled ──> 10, 11, 12 measured ── filled ──> 100, 101, 102 measured ── filled ──> 998, 999, 1,000 measured
                                                               └── the last ones again, after every table was compacted

What is filled is what iterations leave, made faster: Arrow tables appended in the batches of `collect`, rows put into the
journal, MLflow runs copied inside its database. Each figure is the median of three iterations.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from rich.console import Console

from pipelines.report.record import record, write_reports
from pipelines.report.summaries import RECORD, Summaries
from pipelines.run.run import Run
from stores.files import list_files
from stores.journal.journal import DONE
from stores.journal.schema import STAGES
from stores.journal.stage_results import StageResult
from stores.traces.rows import episode_table, reward_table
from stores.traces.tables import TraceTables
from stores.types import EpisodeRewards, Purpose, RewardsRef, Trace, TracesRef, episode_id
from tests.bench import trace_store
from tests.bench.figures import Figure
from tests.bench.setting import open_run
from tests.stage_records import collected, decided, evaluated, model_ref, scored, synced, trained
from tests.train_loops.synthetic_traces import rewards_for

NUM_ITERATIONS = 1000
NUM_EPISODES = 384
BATCH = 64
"""Episodes per write."""
MOMENTS = {10: (10, 11, 12), 100: (100, 101, 102), 1000: (998, 999, 1000)}
MOST = 1.5
"""Times that iteration 1,000 may cost what iteration 10 does."""
MOST_PAGE_BYTES = 8_000_000
TEAM = "team"
AGENTS = ("solver", "verifier", "refiner", "finalizer")
METRICS = [f"train/{name}" for name in ("kl_k3", "kl_k1", "entropy", "grad_norm", "clip_share", "logprob_gap_mean")]
METRICS += ["train/logprob_gap_max", "train/advantages_s", "train/update_s", "train/old_logprobs_s"]
METRICS += [f"train/figure_{i}" for i in range(30)]
FUNNEL = {"calls": 384.0, "with_ids": 384.0, "episodes_ok": 380.0, "scored": 380.0, "non_zero_advantage": 300.0}

Costs = dict[str, list[tuple[float, float]]]
"""Wall and CPU seconds of each measured iteration, by what was done."""


def measure(folder: Path) -> list[Figure]:
    """Fills and measures; ratios of wall seconds are limited, those of CPU seconds are in the notes."""
    run = open_run("growth", folder, {"iterations": NUM_ITERATIONS, "storage.mlflow": f"sqlite:///{folder}/mlflow.db"})
    episodes = trace_store._traces(NUM_EPISODES)
    _measure(run, 1, episodes, {})  # the first iteration loads the libraries, and is copied below
    costs, done = dict[str, Costs](), 1
    for moment, numbers in MOMENTS.items():
        _fill(run, range(done + 1, numbers[0]), episodes)
        costs[str(moment)] = {}
        for number in numbers:
            _measure(run, number, episodes, costs[str(moment)])
        done = numbers[-1]
    sizes = [
        Figure("report.html at 1,000", _size(f"{run.folder}/report.html"), "bytes", most=MOST_PAGE_BYTES),
        Figure("journal at 1,000", sum(_size(str(file)) for file in Path(run.folder).glob("journal.db*")) / 1e6, "MB"),
        Figure("trace store at 1,000", _size(run.traces_uri) / 1e6, "MB", note="never maintained"),
    ]
    began = time.perf_counter()
    tables = run.traces.tables(run.run_id)
    run.traces.compact(drop_before=dict.fromkeys(tables, 0))
    sizes.append(Figure("compact all tables once", time.perf_counter() - began, "s", note=f"{len(tables)} tables"))
    costs["1000, maintained"] = {}
    for number in range(NUM_ITERATIONS + 1, NUM_ITERATIONS + 4):
        _measure(run, number, episodes, costs["1000, maintained"])
    return [*_ratios(costs), *sizes]


def _measure(run: Run, number: int, episodes: list[Trace], costs: Costs) -> None:
    """Plays one iteration as its stages would, but for sampling and training, and adds to `costs`."""
    traces, store = _traces_of(run, number, episodes), run.traces
    key: dict[str, Any] = {"run_id": run.run_id, "iteration": number, "purpose": Purpose.TRAIN}
    rewards = [_rewards_of(trace) for trace in traces]

    def write() -> None:
        for start in range(0, NUM_EPISODES, BATCH):
            store.write_episodes(traces[start : start + BATCH])

    _timed(costs, "write", write)
    ref = _timed(costs, "pin", lambda: store.pin_episodes(**key, team_key=TEAM))
    _timed(costs, "read", lambda: sum(1 for _ in store.read_traces(ref)))
    _timed(costs, "get", lambda: [store.get_trace(trace.episode_id, run_id=run.run_id) for trace in traces[::40]])
    _timed(costs, "write rewards", lambda: store.write_rewards(rewards))
    paid = _timed(costs, "pin rewards", lambda: store.pin_rewards(**key, credit_version="c1", traces=ref))
    _put(run, _stage_rows(run, number, ref, paid))
    _timed(costs, "record", lambda: record(run, number))
    _timed(costs, "report", lambda: write_reports(run))


def _timed(costs: Costs, name: str, work: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    costs.setdefault(name, []).append((time.perf_counter() - wall, time.process_time() - cpu))
    return result


def _ratios(costs: Mapping[str, Costs]) -> list[Figure]:
    figures = []
    for name in costs["10"]:
        first = [median(values) for values in zip(*costs["10"][name], strict=True)]
        for moment in list(costs)[1:]:
            now = [median(values) for values in zip(*costs[moment][name], strict=True)]
            note = (
                f"{first[0]:.3f} s -> {now[0]:.3f} s; CPU {first[1]:.3f} s -> {now[1]:.3f} s, {now[1] / first[1]:.2f}x"
            )
            limit = None if moment == "100" else MOST
            figures.append(Figure(f"{name}, {moment} / 10", now[0] / first[0], "x", most=limit, note=note))
    return figures


# ---- what iterations leave


def _fill(run: Run, numbers: range, episodes: list[Trace]) -> None:
    console, began = Console(), time.perf_counter()
    table = episode_table(episodes)
    paid = reward_table([_rewards_of(trace) for trace in _traces_of(run, 1, episodes)])
    for number in numbers:
        ids = [trace.episode_id for trace in _traces_of(run, number, episodes)]
        own = {"episode_id": ids, "run_id": [run.run_id] * len(ids), "iteration": [number] * len(ids)}
        batches = _replaced(table, own).to_batches(BATCH)
        _append(run, "episodes", number, [pa.Table.from_batches([batch]) for batch in batches])
        _append(run, "rewards", number, [_replaced(paid, own | {"reward_id": [f"{i}/c1" for i in ids]})])
    for start in range(0, len(numbers), 100):
        part = numbers[start : start + 100]
        rows = [row for number in part for row in _stage_rows(run, number, *_refs(run, number))]
        _put(run, [*rows, *(_row(run, number, RECORD, {}) for number in part)])
    Summaries(run).so_far()
    _copy_mlflow_runs(Path(run.tracker.tracking_uri.removeprefix("sqlite:///")), numbers)
    console.print(f"filled iterations {numbers.start} to {numbers.stop - 1} in {time.perf_counter() - began:.0f} s")


def _append(run: Run, kind: str, number: int, tables: Iterable[pa.Table]) -> None:
    table = TraceTables(run.traces_uri, run.traces.schemas).open_iteration(kind, run.run_id, number)
    for part in tables:
        table.add(part)


def _replaced(table: pa.Table, columns: Mapping[str, list[Any]]) -> pa.Table:
    for name, values in columns.items():
        field = table.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
    return table


def _traces_of(run: Run, number: int, episodes: list[Trace]) -> list[Trace]:
    key: dict[str, Any] = {"run_id": run.run_id, "iteration": number, "purpose": Purpose.TRAIN, "team_key": TEAM}
    return [
        replace(
            trace,
            **key,
            episode_id=episode_id(**key, task_id=trace.task.task_id, episode_index=trace.episode_index),
        )
        for trace in episodes
    ]


def _rewards_of(trace: Trace) -> EpisodeRewards:
    return rewards_for(trace, [0.5] * len(trace.turns), outcome=float(trace.episode_index % 2), part="answer")


def _refs(run: Run, number: int) -> tuple[TracesRef, RewardsRef]:
    """What the stages of a filled iteration refer to; nobody reads them again."""
    key: dict[str, Any] = {"uri": run.traces_uri, "version": 7, "tag": f"it{number}", "run_id": run.run_id}
    key |= {"iteration": number, "purpose": Purpose.TRAIN, "team_key": TEAM, "num_episodes": NUM_EPISODES}
    return TracesRef(**key), RewardsRef(**key, credit_version="c1")


def _stage_rows(run: Run, number: int, traces: TracesRef, rewards: RewardsRef) -> list[dict[str, Any]]:
    metrics = {name: 0.01 + (number * 7 + i) % 13 / 1000 for i, name in enumerate(METRICS)}
    funnel = {f"funnel/{step}": value for step, value in [*FUNNEL.items(), ("trained", 300.0 + number % 50)]}
    agents = {agent: {**{name.removeprefix("train/"): v for name, v in metrics.items()}, **funnel} for agent in AGENTS}
    paid = {"reward": 0.5 + number % 7 / 100, "format_share": 0.9, "calls": 384.0, "completion_tokens": 40.0}
    results: list[tuple[str, StageResult]] = [
        ("", collected(traces=traces)),
        ("", scored(rewards=rewards, outcome=0.4 + number % 9 / 100, agents=dict.fromkeys(AGENTS, paid))),
        *(
            (
                group,
                trained(
                    model=model_ref(group, number), metrics=metrics, agents={a: agents[a] for a in settings.agents}
                ),
            )
            for group, settings in run.config.model_groups.items()
        ),
        ("", synced()),
        ("", evaluated()),
        ("", decided(verdict="reject", team_version=None)),
    ]
    return [_row(run, number, result.STAGE, result.to_json(), group) for group, result in results]


def _row(run: Run, number: int, stage: str, ref: dict[str, Any], group: str = "") -> dict[str, Any]:
    at = 1.7e9 + 60 * number
    return {
        **{"run_id": run.run_id, "iteration": number, "stage": stage, "model_group": group, "status": DONE, "token": 1},
        **{"owner": "bench", "process": "bench", "expires_at": at, "started_at": at, "ended_at": at + 5.0},
        **{"seconds": 5.0, "ref": json.dumps(ref), "error": ""},
    }


def _put(run: Run, rows: list[dict[str, Any]]) -> None:
    with run.journal._connect() as connection:
        connection.execute(STAGES.insert(), rows)


def _copy_mlflow_runs(database: Path, numbers: range) -> None:
    """Copies the MLflow run and the traces of iteration 1, and its points on the curves of the whole run."""
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA cache_size = -400000")  # 400 MB: the keys of MLflow's metrics come in no order
        query = "SELECT run_uuid FROM tags WHERE key = 'troupe.iteration' AND value = '1'"
        (child,) = connection.execute(query).fetchone()
        query = "SELECT value FROM tags WHERE key = 'mlflow.parentRunId' AND run_uuid = ?"
        (parent,) = connection.execute(query, [child]).fetchone()
        query = "SELECT request_id FROM trace_info WHERE request_id LIKE 'tr-0001%'"  # an id begins with its iteration
        traces = [trace for (trace,) in connection.execute(query)]
        for number in numbers:
            copy = f"{number:032x}"
            for table in ("runs", "tags", "params", "latest_metrics", "metrics"):
                _copy_rows(connection, table, "run_uuid", child, copy)
            connection.execute(
                "UPDATE tags SET value = ? WHERE run_uuid = ? AND key = 'troupe.iteration'", [str(number), copy]
            )
            connection.execute(
                "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) SELECT key, value, timestamp, run_uuid, "
                "?, is_nan FROM metrics WHERE run_uuid = ? AND step = 1",
                [number, parent],
            )
            for trace in traces:
                for table in ("trace_info", "trace_tags", "trace_request_metadata", "spans"):
                    column = "trace_id" if table == "spans" else "request_id"
                    _copy_rows(connection, table, column, trace, f"tr-{number:04x}{trace[7:]}")


def _copy_rows(connection: sqlite3.Connection, table: str, column: str, old: str, new: str) -> None:
    names = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
    columns = ", ".join(f'"{name}"' for name in names)
    values = ", ".join("?" if name == column else f'"{name}"' for name in names)
    connection.execute(
        f'INSERT INTO {table} ({columns}) SELECT {values} FROM {table} WHERE "{column}" = ?',
        [new, old],
    )


def _size(place: str) -> int:
    path = Path(place)
    return path.stat().st_size if path.is_file() else sum(file.size_bytes for file in list_files(place))
