"""The client's side of a model call, against a policy that fails on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError

from serve_apps.config import CallConfig
from serve_apps.policy import client as client_module
from serve_apps.policy.client import ContextExhausted, PolicyCallError, RequestRefused, ServeClient
from serve_apps.policy.wire import WireResult
from stores.types import Completion, GenerateRequest, Sampling

pytestmark = pytest.mark.fast

Script = Callable[[int, list[Any]], AsyncIterator[list[Any]]]


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

    def cancel(self) -> None:
        self.handle.num_cancelled += 1


def echo(item: Any) -> WireResult:
    key, prompt, *_, seed = item
    return WireResult(key, [*prompt, seed], [-1.0] * (len(prompt) + 1), "stop", 7, False, "")


def ask(handle: FakeHandle, num: int, **call: Any) -> list[Any]:
    async def main() -> list[Any]:
        client = ServeClient({"g": "app"}, CallConfig(**call), open_app=lambda _: handle)
        asks: list[Awaitable[Completion]] = [client.generate(request(i)) for i in range(num)]
        return await asyncio.gather(*asks, return_exceptions=True)

    return asyncio.run(main())


def request(i: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{i}", model_group="g", prompt_token_ids=[i], sampling=Sampling(max_tokens=4), seed=100 + i
    )


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_PAUSE_S", 0.001)


def test_concurrent_requests_share_calls_of_at_most_batch_max() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        yield [echo(item) for item in batch]

    handle = FakeHandle(script)
    answers = ask(handle, 10, batch_max=4)
    assert [len(b) for b in handle.batches] == [4, 4, 2]
    assert [list(a.token_ids) for a in answers] == [[i, 100 + i] for i in range(10)]
    assert {(a.policy_version, a.num_attempts) for a in answers} == {(7, 1)}


def test_after_a_dead_replica_only_the_unfinished_requests_are_repeated_with_their_seeds() -> None:
    async def script(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        if number == 1:
            yield [echo(item) for item in batch[:2]]
            raise RayActorError()
        yield [echo(item) for item in batch]

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


def test_a_call_that_hangs_is_cancelled_at_its_deadline_and_repeated() -> None:
    async def script(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        if number == 1:
            await asyncio.sleep(60)
        yield [echo(item) for item in batch]

    handle = FakeHandle(script)
    (answer,) = ask(handle, 1, call_timeout_s=0.5)
    assert answer.num_attempts == 2 and handle.num_cancelled == 1


def test_a_stream_that_ends_early_counts_as_a_failure() -> None:
    async def script(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        yield [echo(item) for item in batch[: 1 if number == 1 else None]]

    assert [a.num_attempts for a in ask(FakeHandle(script), 3)] == [1, 2, 2]


def test_a_request_that_cannot_run_fails_alone_and_is_not_repeated() -> None:
    async def script(_: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
        reasons = ["context", "refused"]
        errors = [
            WireResult(item.key, [], [], reason, 7, False, "why") for item, reason in zip(batch, reasons, strict=False)
        ]
        yield errors + [echo(item) for item in batch[2:]]

    handle = FakeHandle(script)
    answers = ask(handle, 4)
    assert isinstance(answers[0], ContextExhausted) and isinstance(answers[1], RequestRefused)
    assert [a.token_ids[-1] for a in answers[2:]] == [102, 103]
    assert len(handle.batches) == 1


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_a_request_that_the_engine_gives_up_is_repeated_and_then_fails_with_its_reason(reason: str) -> None:
    def script(num_bad: int) -> Script:
        async def results(number: int, batch: list[Any]) -> AsyncIterator[list[Any]]:
            first, *rest = batch
            yield [WireResult(first.key, [1], [-1.0], reason, 7, False, "") if number <= num_bad else echo(first)]
            yield [echo(item) for item in rest]

        return results

    assert [a.num_attempts for a in ask(FakeHandle(script(1)), 3)] == [2, 1, 1]
    failed, *others = ask(FakeHandle(script(2)), 3, max_attempts=2)
    assert isinstance(failed, PolicyCallError) and f"finish reason '{reason}'" in str(failed)
    assert [a.num_attempts for a in others] == [1, 1]


def test_an_unknown_model_group_is_refused_by_name() -> None:
    async def main() -> None:
        await ServeClient({"other": "app"}, CallConfig()).generate(request(0))

    with pytest.raises(RequestRefused, match=r"'g'.*'other'"):
        asyncio.run(main())
