"""What a replica tells about requests that are under way, on an engine that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from serve_apps.policy import generation as generation_module
from serve_apps.policy.generation import Generation
from serve_apps.policy.serving_state import ServingState
from serve_apps.policy.wire import NO_VERSION, REFUSED, WireProgress, WireRequest, WireResult

pytestmark = pytest.mark.fast

PULSE_S = 0.02


class HandEngine:
    """Has the part of `AsyncLLM` that tells what is under way: `request_states` as vLLM's output processor keeps them."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=512)
        self.output_processor = SimpleNamespace(request_states={})

    def add(self, request_id: str) -> None:
        tokens: list[int] = []
        state = SimpleNamespace(external_req_id=request_id, is_prefilling=True, tokens=tokens)
        state.detokenizer = SimpleNamespace(num_output_tokens=lambda: len(tokens))
        self.output_processor.request_states[f"{request_id}-x"] = state

    def sample(self, request_id: str) -> None:
        state = self.output_processor.request_states[f"{request_id}-x"]
        state.is_prefilling = False
        state.tokens.append(1)

    def end(self, request_id: str) -> None:
        del self.output_processor.request_states[f"{request_id}-x"]


class HandGeneration(Generation):
    """Runs requests until they are finished by hand."""

    def __init__(self, engine: HandEngine) -> None:
        super().__init__(engine, routes=SimpleNamespace(states={}), stop_token_ids=())  # type: ignore[arg-type]
        self.engine, self.finished = engine, asyncio.Event()
        self.num_looks = 0

    def _progress(self) -> tuple[int, dict[str, int]]:
        self.num_looks += 1
        return super()._progress()

    async def _complete(self, request: WireRequest, request_id: str) -> WireResult:
        self.engine.add(request_id)
        await self.finished.wait()
        return WireResult(request.key, [1], [-1.0], "stop", 0, False, "")


def request(key: int) -> WireRequest:
    return WireRequest(key, [1, 2], 4, 1.0, 1.0, 0, 0.0, "g", key)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "PULSE_S", PULSE_S)


async def heard(batch: Any, messages: list[Any]) -> None:
    """Adds the messages of `batch` to `messages` as they come."""
    async for message in batch:
        messages.append(message)


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition; TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(PULSE_S / 4)


def test_a_batch_whose_requests_wait_hears_that_the_engine_samples_for_others() -> None:
    async def main() -> list[Any]:
        engine, messages = HandEngine(), list[Any]()
        engine.add("other")
        listening = asyncio.ensure_future(heard(HandGeneration(engine).batch([request(7)]), messages))

        def goes_on() -> bool:
            engine.sample("other")
            return len(messages) >= 2

        await until(goes_on)
        listening.cancel()
        return messages

    assert set(map(repr, asyncio.run(main()))) == {repr(WireProgress({}))}


def test_a_request_that_has_begun_comes_with_its_tokens() -> None:
    async def main() -> list[Any]:
        engine, messages = HandEngine(), list[Any]()
        listening = asyncio.ensure_future(heard(HandGeneration(engine).batch([request(7), request(8)]), messages))
        await until(lambda: len(engine.output_processor.request_states) == 2)
        for _ in range(3):
            engine.sample("2")
        await until(lambda: bool(messages))
        listening.cancel()
        return messages

    assert asyncio.run(main()) == [WireProgress({8: 3})]


def test_requests_that_come_and_go_do_not_pass_for_progress_of_an_engine_that_hangs() -> None:
    async def main() -> list[Any]:
        engine, messages = HandEngine(), list[Any]()
        generation = HandGeneration(engine)
        engine.add("a")
        engine.sample("a")
        listening = asyncio.ensure_future(heard(generation.batch([request(7)]), messages))
        for looks in range(2, 8):
            await until(lambda looks=looks: generation.num_looks >= looks)  # type: ignore[misc]
            engine.add(f"new{looks}")
            if looks == 4:
                engine.end("a")  # its caller gave it up
        listening.cancel()
        return messages

    assert asyncio.run(main()) == []


def test_results_end_a_batch() -> None:
    async def main() -> list[Any]:
        generation = HandGeneration(HandEngine())
        generation.finished.set()
        return [message async for message in generation.batch([request(1), request(2)])]

    (results,) = asyncio.run(main())
    assert sorted(result.key for result in results) == [1, 2]


async def told(generation: Generation, group: str) -> list[tuple[str, int, str]]:
    """Finish reason, version and error of a request to a group, in a batch and streamed."""
    asked = request(0)._replace(model_group=group)
    whole = await generation._complete(asked, "r")
    streamed = [delta async for delta in generation.stream(asked, {})]
    return [
        (whole.finish_reason, whole.policy_version, whole.error),
        *((d.finish_reason, d.policy_version, d.error) for d in streamed),
    ]


def test_a_group_whose_adapter_could_not_be_loaded_is_not_answered_by_the_bare_base() -> None:
    states = {"solver": ServingState(error="no answer from s3://bucket")}
    routes: Any = SimpleNamespace(states=states, route=lambda group: None)
    generation = Generation(HandEngine(), routes, stop_token_ids=())
    lost = ("abort", NO_VERSION, "no adapter of 'solver' is live: no answer from s3://bucket")
    assert asyncio.run(told(generation, "solver")) == [lost, lost], "another replica may answer"
    refused = (REFUSED, NO_VERSION, "no adapter of 'stranger' is live; groups are solver")
    assert asyncio.run(told(generation, "stranger")) == [refused, refused]
