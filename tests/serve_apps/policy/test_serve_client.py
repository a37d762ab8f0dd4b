"""The client's side of a model call, against a policy that fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from ray.exceptions import RayActorError

from serve_apps.config import CallConfig
from serve_apps.engines.port import Piece, Progress
from serve_apps.episode_clock import EpisodeClock
from serve_apps.policy.client import ContextExhausted, PolicyCallError, RequestRefused
from serve_apps.policy.serve_client import ServeClient
from stores.types import Completion, GenerateRequest, Sampling

pytestmark = pytest.mark.fast

T = TypeVar("T")
Script = Callable[[int, list[Any]], AsyncIterator[list[Any]]]


class InstantLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only where everybody waits, and then at once: a busy machine changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        waits = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if waits and not self._ready:  # type: ignore[attr-defined]
            self._now = max(self._now, min(waits))
        super()._run_once()  # type: ignore[misc]


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in a loop whose seconds take no time."""
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        return runner.run(main)


class FakeHandle:
    """Stands for a streaming Serve handle: call number -> what it yields or raises."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.batches: list[list[Any]] = []
        self.num_cancelled = 0

    def remote(self, batch: list[Any]) -> FakeStream:
        self.batches.append(batch)
        return FakeStream(self, self.script(len(self.batches), batch))


class FakeStream:
    """What `FakeHandle.remote` returns."""

    def __init__(self, handle: FakeHandle, results: AsyncIterator[list[Any]]) -> None:
        self.handle, self.results = handle, results

    def __aiter__(self) -> AsyncIterator[list[Any]]:
        return self.results

    async def _to_object_ref_gen(self) -> None:
        """Serve's: it returns once a replica has taken the call."""
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self.handle.num_cancelled += 1


def echo(item: GenerateRequest) -> Piece:
    prompt = item.prompt_token_ids
    return Piece([*prompt, item.seed], [-1.0] * (len(prompt) + 1), "stop", 7)


def echoes(batch: list[GenerateRequest]) -> list[tuple[int, Piece]]:
    return [(place, echo(item)) for place, item in enumerate(batch)]


def ask(handle: FakeHandle, num: int, capacity: int | None = None, **call: Any) -> list[Any]:
    async def main() -> list[Any]:
        client = client_of(handle, capacity=capacity, **call)
        asks: list[Awaitable[Completion]] = [client.generate(request(i)) for i in range(num)]
        return await asyncio.gather(*asks, return_exceptions=True)

    return run(main())


def client_of(handle: FakeHandle, capacity: int | None = None, **call: Any) -> ServeClient:
    """A client of one app that two model groups share."""
    limits = None if capacity is None else {"app": capacity}
    return ServeClient({"g": "app", "h": "app"}, CallConfig(**call), capacity=limits, open_app=lambda _: handle)


class FakeEngine:
    """Stands for an engine that samples `size` requests at once, a token of each per step, and reports as a replica does."""

    def __init__(self, *, size: int, tokens: int = 24, step_s: float = 0.25) -> None:
        self.size, self.tokens, self.step_s = size, tokens, step_s
        self.queue: list[Any] = []
        self.sampled: dict[int, int] = {}
        self.num_steps = self.most = self.wasted = 0
        self.hangs_at = 10**9

    async def run(self) -> None:
        """Samples for ever."""
        while True:
            await asyncio.sleep(self.step_s)
            if self.num_steps < self.hangs_at and self.queue:
                self.num_steps += 1
                for item in self.queue[: self.size]:
                    self.sampled[id(item)] = self.sampled.get(id(item), 0) + 1

    async def stream(self, _: int, batch: list[Any]) -> AsyncIterator[Any]:
        """What `Generation.run` yields."""
        self.queue += batch
        self.most = max(self.most, len(self.queue))
        left, seen = dict(enumerate(batch)), self.num_steps
        try:
            while left:
                await asyncio.sleep(self.step_s)
                done = {place: item for place, item in left.items() if self.sampled.get(id(item), 0) >= self.tokens}
                for place, item in done.items():
                    del left[place]
                    self.queue.remove(item)
                if done:
                    yield [(place, echo(item)) for place, item in done.items()]
                elif self.num_steps > seen:
                    seen = self.num_steps
                    yield Progress({i: n for i, item in left.items() if (n := self.sampled.get(id(item), 0))})
        finally:
            for item in left.values():
                self.queue.remove(item)
                self.wasted += self.sampled.get(id(item), 0)


def play(engine: FakeEngine, num: int, capacity: int | None = None, **call: Any) -> tuple[list[Any], ServeClient]:
    """Asks for `num` completions at once; the answers, in order, and the client."""

    async def main() -> tuple[list[Any], ServeClient]:
        client = client_of(FakeHandle(engine.stream), capacity, **call)
        sampling = asyncio.ensure_future(engine.run())
        answers = await asyncio.gather(*(client.generate(request(i)) for i in range(num)), return_exceptions=True)
        sampling.cancel()
        return answers, client

    return run(main())


def request(i: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{i}", model_group="g", prompt_token_ids=[i], sampling=Sampling(max_tokens=4), seed=100 + i
    )


def test_concurrent_requests_share_calls_of_at_most_batch_max() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        yield echoes(batch)

    handle = FakeHandle(script)
    answers = ask(handle, 10, batch_max=4)
    assert [len(b) for b in handle.batches] == [4, 4, 2]
    assert [list(a.token_ids) for a in answers] == [[i, 100 + i] for i in range(10)]
    assert {(a.policy_version, a.num_attempts) for a in answers} == {(7, 1)}


def test_after_a_dead_replica_only_the_unfinished_requests_are_repeated_with_their_seeds() -> None:
    async def script(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        if number == 1:
            yield echoes(batch)[:2]
            raise RayActorError()
        yield echoes(batch)

    handle = FakeHandle(script)
    answers = ask(handle, 5)
    assert [[item.seed for item in b] for b in handle.batches] == [[100, 101, 102, 103, 104], [102, 103, 104]]
    assert [a.num_attempts for a in answers] == [1, 1, 2, 2, 2]
    assert [a.token_ids[-1] for a in answers] == [100, 101, 102, 103, 104]


def test_the_last_failed_attempt_raises_and_says_why() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        raise RayActorError()
        yield batch

    handle = FakeHandle(script)
    (answer,) = ask(handle, 1, max_attempts=2)
    assert isinstance(answer, PolicyCallError)
    assert "'r0' failed 2 times" in str(answer) and isinstance(answer.__cause__, RayActorError)
    assert len(handle.batches) == 2


def test_many_attempts_take_minutes_and_not_hours() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        raise RayActorError()
        yield batch

    async def main() -> float:
        with suppress(PolicyCallError):
            await client_of(FakeHandle(script), max_attempts=10).generate(request(0))
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(0.5 + 2 + 8 + 6 * 30, abs=1)


def test_a_call_of_which_nothing_comes_is_cancelled_and_repeated() -> None:
    async def script(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        if number == 1:
            await asyncio.sleep(10**6)
        yield echoes(batch)

    handle = FakeHandle(script)
    (answer,) = ask(handle, 1)
    assert answer.num_attempts == 2 and handle.num_cancelled == 1


def test_a_stream_that_ends_early_counts_as_a_failure() -> None:
    async def script(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        yield echoes(batch)[: 1 if number == 1 else None]

    assert [a.num_attempts for a in ask(FakeHandle(script), 3)] == [1, 2, 2]


@pytest.mark.parametrize("fault", [asyncio.CancelledError(), KeyError(3)], ids=["cancelled by Serve", "a bug"])
def test_a_call_that_ends_in_any_error_frees_its_place_and_is_repeated(fault: BaseException) -> None:
    async def script(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        if number == 1:
            raise fault
        yield echoes(batch)

    async def scene() -> list[Completion]:
        client = client_of(FakeHandle(script), capacity=1)
        async with asyncio.timeout(60):
            return [await client.generate(request(0)), await client.generate(request(1))]

    assert [answer.num_attempts for answer in run(scene())] == [2, 1]


def test_a_request_that_cannot_run_fails_alone_and_is_not_repeated() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        reasons = ["context", "refused"]
        errors = [(i, Piece(finish_reason=reason, policy_version=7, error="why")) for i, reason in enumerate(reasons)]
        yield errors + echoes(batch)[2:]

    handle = FakeHandle(script)
    answers = ask(handle, 4)
    assert isinstance(answers[0], ContextExhausted) and isinstance(answers[1], RequestRefused)
    assert [a.token_ids[-1] for a in answers[2:]] == [102, 103]
    assert len(handle.batches) == 1


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_a_request_that_the_engine_gives_up_is_repeated_and_then_fails_with_its_reason(reason: str) -> None:
    def script(num_bad: int) -> Script:
        async def results(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
            yield [(0, Piece([1], [-1.0], reason, 7) if number <= num_bad else echo(batch[0]))]
            yield echoes(batch)[1:]

        return results

    assert [a.num_attempts for a in ask(FakeHandle(script(1)), 3)] == [2, 1, 1]
    failed, *others = ask(FakeHandle(script(2)), 3, max_attempts=2)
    assert isinstance(failed, PolicyCallError) and f"finish reason '{reason}'" in str(failed)
    assert [a.num_attempts for a in others] == [1, 1]


@pytest.mark.parametrize("capacity", [None, 16])
def test_no_call_is_repeated_while_a_slow_engine_samples_however_long_its_queue_is(capacity: int | None) -> None:
    engine = FakeEngine(size=16)
    answers, client = play(engine, 200, capacity)
    assert engine.num_steps * engine.step_s > CallConfig().call_timeout_s, "all together take longer than the limit"
    assert {a.num_attempts for a in answers} == {1} and not engine.wasted
    counts = client.counts
    assert (counts.num_calls, counts.num_late, counts.num_lost, counts.num_tokens) == (200, 0, 0, 400)


def test_an_engine_that_hangs_is_noticed_though_it_had_begun() -> None:
    engine = FakeEngine(size=4)
    engine.hangs_at = 30
    answers, client = play(engine, 8, max_attempts=2)
    assert [isinstance(a, PolicyCallError) for a in answers] == [False] * 4 + [True] * 4
    assert "nothing came from the engine for call_timeout_s = 60 s" in str(answers[-1])
    assert (client.counts.num_late, client.counts.num_lost) == (4, 0)


@pytest.mark.parametrize("capacity", [1, 5, 64])
def test_no_more_calls_are_under_way_than_the_engine_takes(capacity: int) -> None:
    engine = FakeEngine(size=capacity)
    answers, _ = play(engine, 40, capacity, batch_max=16)
    assert engine.most == min(40, capacity) and len(answers) == 40


def test_two_model_groups_on_one_engine_share_its_places() -> None:
    engine = FakeEngine(size=6)

    async def main() -> None:
        client = client_of(FakeHandle(engine.stream), 6)
        sampling = asyncio.ensure_future(engine.run())
        await asyncio.gather(*(client.generate(replace(request(i), model_group="gh"[i % 2])) for i in range(20)))
        sampling.cancel()

    run(main())
    assert engine.most == 6


def test_the_episode_that_began_first_goes_first() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        await asyncio.sleep(0.005)
        yield echoes(batch)

    handle = FakeHandle(script)

    async def main() -> None:
        clocks = [EpisodeClock() for _ in range(4)]
        client = client_of(handle, capacity=1)

        async def turn(i: int) -> None:
            with clocks[i].is_current():
                await client.generate(request(i))

        await asyncio.gather(*(turn(i) for i in (2, 3, 1, 0)))

    run(main())
    assert [batch[0].seed for batch in handle.batches] == [100, 101, 102, 103]


def test_calls_that_wait_for_a_dead_app_fail_with_those_that_tried() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        raise RayActorError()
        yield batch

    handle = FakeHandle(script)
    answers = ask(handle, 50, capacity=2, max_attempts=3)
    assert all(isinstance(answer, PolicyCallError) for answer in answers)
    assert len(handle.batches) == 3, "the 48 others do not find out one after the other"
    assert "'r49' waited while all others ended with RayActorError" in str(answers[-1])


def test_calls_that_wait_are_sent_when_those_in_their_way_fail_and_are_given_up() -> None:
    async def script(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        if number == 1:
            raise RayActorError()
        yield echoes(batch)

    handle = FakeHandle(script)

    async def main() -> Completion:
        client = client_of(handle, capacity=1)
        first = asyncio.ensure_future(client.generate(request(0)))
        await asyncio.sleep(0.1)  # it failed, and waits for its second attempt
        second = asyncio.ensure_future(client.generate(request(1)))
        await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(60):
            return await second

    run(main())
    assert len(handle.batches) == 2


def test_nobody_samples_for_callers_who_have_gone() -> None:
    engine = FakeEngine(size=4, tokens=10**6)
    handle = FakeHandle(engine.stream)

    async def main() -> None:
        client = client_of(handle, capacity=4)
        sampling = asyncio.ensure_future(engine.run())
        calls = [asyncio.ensure_future(client.generate(request(i))) for i in range(4)]
        await asyncio.sleep(2)
        for call in calls:
            call.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(20):
                while not handle.num_cancelled:
                    await asyncio.sleep(1)
        engine.tokens = 1
        await client.generate(request(4))  # there is room again
        sampling.cancel()

    run(main())
    assert handle.num_cancelled == 1


@pytest.mark.parametrize("limit", ["turn", "episode"])
@pytest.mark.parametrize("capacity", [1, None])
def test_deadlines_of_an_episode_stand_still_until_an_engine_begins_on_its_call(
    limit: str, capacity: int | None
) -> None:
    """Of two calls the second waits 25 s for the first, in the client or in the engine: beyond its deadline of 10 s."""
    engine = FakeEngine(size=1, tokens=100)

    async def main() -> float:
        client = client_of(FakeHandle(engine.stream), capacity)
        sampling = asyncio.ensure_future(engine.run())
        first = asyncio.ensure_future(client.generate(request(0)))
        await asyncio.sleep(0)
        clock = EpisodeClock()

        async def second() -> None:
            with clock.is_current():
                async with clock.deadline(10) if limit == "turn" else nullcontext():
                    await client.generate(request(1))

        async with clock.deadline(10) if limit == "episode" else nullcontext():
            await asyncio.sleep(2)  # the clock counts that
            waiting = asyncio.ensure_future(second())
            await first
            engine.tokens = 8
            await waiting
        sampling.cancel()
        return asyncio.get_running_loop().time()

    assert run(main()) > 25


def test_short_calls_of_which_no_report_comes_use_up_an_episodes_time() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        await asyncio.sleep(1)
        yield echoes(batch)

    async def main() -> None:
        client, clock = client_of(FakeHandle(script), capacity=1), EpisodeClock()
        async with clock.deadline(10):
            with clock.is_current():
                for i in range(100):
                    await client.generate(request(i))

    with pytest.raises(TimeoutError):
        run(main())


def test_a_deadline_counts_from_the_first_token_on() -> None:
    engine = FakeEngine(size=1, tokens=10**6)

    async def main() -> None:
        client = client_of(FakeHandle(engine.stream))
        sampling = asyncio.ensure_future(engine.run())
        clock = EpisodeClock()
        try:
            with clock.is_current():
                async with clock.deadline(5):
                    await client.generate(request(0))
        finally:
            sampling.cancel()

    with pytest.raises(TimeoutError):
        run(main())


def test_a_caller_who_cannot_wait_is_told_that_no_replica_is_there_and_the_call_is_not_repeated() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        yield echoes(batch)

    handle = FakeHandle(script)

    async def main() -> None:
        client = ServeClient({"g": "app"}, CallConfig(), open_app=lambda _: handle, replica_timeout_s=5)
        with pytest.raises(PolicyCallError, match="no replica of app 'app' took the call within 5 s"):
            await client.generate(request(0))
        assert client.counts.num_lost == 0

    run(main())
    assert (len(handle.batches), handle.num_cancelled) == (1, 1)


def test_an_unknown_model_group_is_refused_by_name() -> None:
    async def main() -> None:
        await ServeClient({"other": "app"}, CallConfig()).generate(request(0))

    with pytest.raises(RequestRefused, match=r"'g'.*'other'"):
        run(main())
