"""sampling on real Ray, Ray Data, Serve and LanceDB; only the engine is a fake that sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import one_call
import psutil
import pytest
from seen_spans import collector, tree_of
from test_watchdog import KEY, fake_run, stacks_of

from pipelines.config.sections import BudgetConfig, CollectConfig
from pipelines.episodes.collector import MAX_UNSTORED, end_collectors
from pipelines.episodes.sampling import InfrastructureFailures, Pass, PromptsTooLong, Sampled, sample_episodes
from pipelines.run.run import plain
from pipelines.run.watchdog import StageHung, Watchdog
from serve_apps.config import CallConfig, EpisodeConfig, TelemetryConfig
from serve_apps.episode.runner import CONTEXT_EXHAUSTED
from serve_apps.episode.team import TeamSpec
from serve_apps.episode_spec import EpisodeSpec
from stores.traces.store import TraceStore
from stores.types import EpisodeStatus, Purpose, Sampling, Task, Trace

pytestmark = pytest.mark.nightly

SIZE = 4
FAST_S, SLOW_S = 0.1, 30.0
LIMITS = EpisodeConfig(max_attempts=1)
CONFIG = CollectConfig(
    episodes_per_task=SIZE,
    num_workers=2,
    episodes_in_flight=SIZE,
    episode=LIMITS,
    call=CallConfig(max_attempts=1),
)


@pytest.fixture(scope="module")
def app(ray_local: None) -> Iterator[str]:
    from ray import serve

    one_call.deploy("fake-policy", fast_s=FAST_S, slow_s=SLOW_S)
    yield "fake-policy"
    serve.delete("fake-policy")


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    store = TraceStore(str(tmp_path / "traces"))
    store.create()
    return store


def tasks(count: int, *, num_slow: int = 0) -> list[Task]:
    """The first `num_slow` have long questions, which the fake is slow on."""
    return [
        Task(task_id=f"t{i}", prompt=f"{i} + {i} = " * (20 if i < num_slow else 1), answers=(str(2 * i),))
        for i in range(count)
    ]


def sample(store: TraceStore, app: str, model: Path, chosen: list[Task], config: CollectConfig, **more: Any) -> Sampled:
    team_spec = TeamSpec(
        workflow="one_call:OneCall",
        settings={},
        group_of={"solver": "team"},
        tokenizers={"team": str(model)},
        max_model_len={"team": 256},
        sampling={"solver": Sampling(max_tokens=8)},
        policy_versions={"team": 0},
        team_key="team",
        limits=LIMITS,
    )
    by = Pass(
        run_id="run",
        iteration=1,
        purpose=Purpose.TRAIN,
        team_spec=team_spec,
        apps={"team": app},
        capacity={app: 64},
        store=store,
        config=config,
        seed=0,
    )
    return sample_episodes(chosen, by, episodes_per_task=SIZE, **more)


def sizes(store: TraceStore, sampled: Sampled) -> dict[str, int]:
    """Episodes by task, as a reader of the ref sees them."""
    found: dict[str, int] = {}
    for trace in store.read_traces(sampled.traces):
        found[trace.task.task_id] = found.get(trace.task.task_id, 0) + 1
    return found


def test_the_spans_of_a_pass_are_at_the_collector_when_it_ends_and_the_next_pass_may_have_none(
    app: str, store: TraceStore, tiny_model: Path
) -> None:
    with collector() as running:
        config = CONFIG.model_copy(update={"telemetry": TelemetryConfig(endpoint=running.endpoint)})
        sampled = sample(store, app, tiny_model, tasks(3), config)
        spans = [*running.spans]
        assert tree_of(spans) == [("invoke_workflow OneCall", [("invoke_agent solver", ["chat team"])])] * 3 * SIZE
        assert {span.service for span in spans} == {"troupe-episodes"}
        episodes = {trace.episode_id: trace.task.task_id for trace in store.read_traces(sampled.traces)}
        named = [span.attributes for span in spans if not span.parent_id]
        assert {about["troupe.episode_id"]: about["troupe.task_id"] for about in named} == episodes
        sample(store, app, tiny_model, tasks(4), CONFIG)
    assert running.spans == spans


def test_a_spent_budget_ends_with_complete_groups_and_a_repetition_plays_no_more(
    app: str, store: TraceStore, tiny_model: Path
) -> None:
    config = CONFIG.model_copy(update={"budget": BudgetConfig(tokens=6 * SIZE * one_call.NUM_TOKENS)})
    sampled = sample(store, app, tiny_model, tasks(40), config, num_enough=40)
    found = sizes(store, sampled)
    assert sampled.stopped_by == "tokens"
    assert set(found.values()) == {SIZE}
    assert 6 <= len(found) == len(sampled.groups) < 40
    assert len(sampled.tasks_left) == 40 - len(found)
    again = sample(store, app, tiny_model, tasks(40), config, num_enough=40)
    assert (again.num_new, again.traces) == (0, sampled.traces)
    assert again.stopped_by == "tokens"


def test_a_budget_of_seconds_closes_by_itself(app: str, store: TraceStore, tiny_model: Path) -> None:
    config = CONFIG.model_copy(update={"budget": BudgetConfig(seconds=1.0), "num_workers": 1})
    sampled = sample(store, app, tiny_model, tasks(100), config, num_enough=100)
    assert sampled.stopped_by == "seconds"
    assert set(sizes(store, sampled).values()) == {SIZE}
    assert 1 <= len(sampled.groups) < 100


def test_over_sampling_ends_without_the_slow_groups_and_drops_them_whole(
    app: str, store: TraceStore, tiny_model: Path
) -> None:
    config = CONFIG.model_copy(update={"episodes_in_flight": 100})
    sampled = sample(store, app, tiny_model, tasks(8, num_slow=2), config, num_enough=6)
    assert sampled.stopped_by == "enough"
    assert sizes(store, sampled) == {f"t{i}": SIZE for i in range(2, 8)}
    assert sampled.tasks_left == ["t0", "t1"]
    assert sampled.traces.num_episodes == 6 * SIZE


def test_each_pass_says_from_its_start_how_far_it_is(app: str, store: TraceStore, tiny_model: Path) -> None:
    said: list[tuple[int, int]] = []
    for count in (1, 3, 3):
        sample(store, app, tiny_model, tasks(count), CONFIG, progress=lambda done, total, _: said.append((done, total)))
    first, second = said.index((0, SIZE)), said.index((SIZE, 3 * SIZE))
    assert first == 0 and said[second - 1] == (SIZE, SIZE), "the second begins with what is stored"
    assert said[-1] == (3 * SIZE, 3 * SIZE) and said.count(said[-1]) == 1, (
        "the third has nothing to do and says nothing"
    )


def test_without_limits_every_group_is_pinned(app: str, store: TraceStore, tiny_model: Path) -> None:
    said: list[str] = []
    sampled = sample(store, app, tiny_model, tasks(5), CONFIG, progress=lambda done, total, words: said.append(words))
    assert (sampled.calls.num_calls, sampled.calls.num_tokens) == (5 * SIZE, 5 * SIZE * one_call.NUM_TOKENS)
    assert sampled.calls.num_late == sampled.calls.num_lost == 0 and "tokens/s" in said[-1]
    assert (sampled.stopped_by, sampled.tasks_left, sampled.traces.excluded_groups) == (None, [], ())
    assert sizes(store, sampled) == {f"t{i}": SIZE for i in range(5)}


def test_episodes_that_infrastructure_failed_are_played_again_when_the_stage_is(
    app: str, store: TraceStore, tiny_model: Path
) -> None:
    good = sample(store, app, tiny_model, tasks(1), CONFIG)
    with pytest.raises(InfrastructureFailures, match=r"12 of 16 .*12 x infra_error: app 'nowhere', request '#'.*again"):
        sample(store, app="nowhere", model=tiny_model, chosen=tasks(4), config=CONFIG)
    kept = {t.episode_id: t.started_at for t in store.read_traces(good.traces)}
    sampled = sample(store, app, tiny_model, tasks(4), CONFIG)
    traces = list(store.read_traces(sampled.traces))
    assert sampled.num_new == 12
    assert len({t.episode_id for t in traces}) == len(traces) == 16
    assert {t.status for t in traces} == {EpisodeStatus.OK}
    assert {t.episode_id: t.started_at for t in traces if t.episode_id in kept} == kept


@pytest.mark.parametrize(("num_stuck", "is_refused"), [(1, False), (2, True)])
def test_prompts_that_do_not_fit_into_the_context_are_bad_input(
    store: TraceStore, tiny_model: Path, make_trace: Callable[..., Trace], num_stuck: int, is_refused: bool
) -> None:
    where = {"run_id": "run", "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
    chosen = tasks(4)
    specs = [EpisodeSpec(**where, task=t, episode_index=i, run_seed=0) for t in chosen for i in range(SIZE)]
    exhausted = {
        "status": EpisodeStatus.TRUNCATED,
        "stop_reason": CONTEXT_EXHAUSTED,
        "error": "the prompt has 300 tokens",
    }
    for place, spec in enumerate(specs):
        about = {"episode_id": spec.episode_id, "group_id": spec.group_id, "task": spec.task, **where}
        about |= {**exhausted, "turns": ()} if place < num_stuck else exhausted  # the others end after some turns
        store.write_episodes([make_trace(**about)])
    told = r"2 of 16 episodes had no turn .* = 0\.1; task t0: the prompt has 300 tokens: raise serve\.max_model_len"
    with pytest.raises(PromptsTooLong, match=told) if is_refused else nullcontext():
        sample(store, "nowhere", tiny_model, chosen, CONFIG)


def test_a_pass_needs_no_cpu_where_engines_and_trainers_have_them_all(
    app: str, store: TraceStore, tiny_model: Path
) -> None:
    import ray

    sample(store, app, tiny_model, tasks(1), CONFIG)  # its collectors stay
    taker = ray.remote(num_cpus=ray.available_resources()["CPU"])(threading.Event).remote()
    ray.get(taker.is_set.remote())
    try:
        assert ray.available_resources().get("CPU", 0.0) < 0.01
        assert sizes(store, sample(store, app, tiny_model, tasks(4), CONFIG)) == {f"t{i}": SIZE for i in range(4)}
    finally:
        ray.kill(taker)


@pytest.mark.parametrize(
    "title", ["ray::Collector", "ray::Writer", "ray::MapBatches(play)", "ray::MapWorker(MapBatches(Store"]
)
def test_what_carries_episodes_may_be_killed(app: str, store: TraceStore, tiny_model: Path, title: str) -> None:
    """The pass goes on; no episode is lost or there twice."""
    where = {"run_id": "run", "iteration": 1, "purpose": Purpose.TRAIN, "team_key": "team"}
    chosen, killed = tasks(120), []
    sample(store, app, tiny_model, chosen[:1], CONFIG)

    def kill() -> None:
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:  # an operator has a process only while it has a task
            if store.stored_episodes(**where).num_rows > 2 * SIZE:
                for process in processes_of_ray(title):
                    process.kill()
                    killed.append(process.pid)

    killing = threading.Thread(target=kill)
    killing.start()
    sampled = sample(store, app, tiny_model, chosen, CONFIG)
    killing.join()
    assert killed and sampled.num_new >= 119 * SIZE - 2 * MAX_UNSTORED
    assert sizes(store, sampled) == {f"t{i}": SIZE for i in range(120)}


def collectors_here() -> list[psutil.Process]:
    return processes_of_ray("ray::Collector")


def processes_of_ray(title: str) -> list[psutil.Process]:
    from ray._private.worker import global_worker

    from pipelines.extensions.stacks.stacks import processes_of

    def is_called_so(process: psutil.Process) -> bool:
        try:
            return " ".join(process.cmdline()).startswith(title)
        except psutil.NoSuchProcess:  # or a zombie
            return False

    return [process for process in processes_of(global_worker.node.session_name) if is_called_so(process)]


def test_a_stopped_collector_ends_the_stage_at_its_deadline_with_the_stacks_of_all(
    app: str, store: TraceStore, tiny_model: Path, tmp_path: Path
) -> None:
    def collect(lease: Any) -> dict[str, Any]:
        return plain(sample(store, app, tiny_model, tasks(2, num_slow=2), CONFIG).traces)

    def stop() -> None:
        for process in collectors_here():
            process.suspend()

    stopping = threading.Timer(2.0, stop)
    stopping.start()
    watchdog = Watchdog(fake_run(tmp_path), KEY, timeout_s=5, recover=end_collectors)
    with pytest.raises(StageHung, match=r"waits for 2 of 2 groups, of tasks t0, t1; stacks") as caught:
        watchdog.once(collect)
    text = stacks_of(caught.value)
    assert "(stopped)" in text
    assert "ray::Collector.play" in text
    assert "ray::ServeReplica:fake-policy:FakePolicy" in text
    assert "in play" in text or "play (" in text
    deadline = time.monotonic() + 20
    while collectors_here() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not collectors_here()
    assert len(sample(store, app, tiny_model, tasks(2), CONFIG).groups) == 2
