"""What a replica tells about requests that are under way, on an engine that is moved by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from serve_apps.policy import generation as generation_module
from serve_apps.policy.generation import Generation
from serve_apps.policy.wire import WireProgress, WireRequest, WireResult

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

    async def _complete(self, request: WireRequest, request_id: str) -> WireResult:
        self.engine.add(request_id)
        await self.finished.wait()
        return WireResult(request.key, [1], [-1.0], "stop", 0, False, "")


def request(key: int) -> WireRequest:
    return WireRequest(key, [1, 2], 4, 1.0, 1.0, 0, 0.0, "g", key)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "PULSE_S", PULSE_S)


async def heard(batch: Any, waits_s: float) -> list[Any]:
    """The messages of `batch` that come within `waits_s`."""
    messages = []

    async def listen() -> None:
        async for message in batch:
            messages.append(message)

    listening = asyncio.ensure_future(listen())
    await asyncio.wait([listening], timeout=waits_s)
    listening.cancel()
    await asyncio.wait([listening])
    return messages


def test_a_batch_whose_requests_wait_hears_that_the_engine_samples_for_others() -> None:
    async def main() -> list[Any]:
        engine = HandEngine()
        generation = HandGeneration(engine)
        engine.add("other")

        async def sample_other() -> None:
            while True:
                engine.sample("other")
                await asyncio.sleep(PULSE_S / 4)

        sampling = asyncio.ensure_future(sample_other())
        messages = await heard(generation.batch([request(7)]), 5 * PULSE_S)
        sampling.cancel()
        return messages

    messages = asyncio.run(main())
    assert len(messages) >= 2 and set(map(repr, messages)) == {repr(WireProgress({}))}


def test_a_request_that_has_begun_comes_with_its_tokens() -> None:
    async def main() -> list[Any]:
        engine = HandEngine()
        batch = HandGeneration(engine).batch([request(7), request(8)])
        listening = asyncio.ensure_future(heard(batch, 3 * PULSE_S))
        await asyncio.sleep(PULSE_S / 2)
        for _ in range(3):
            engine.sample("2")
        return await listening

    assert asyncio.run(main()) == [WireProgress({8: 3})]


def test_requests_that_come_and_go_do_not_pass_for_progress_of_an_engine_that_hangs() -> None:
    async def main() -> list[Any]:
        engine = HandEngine()
        generation = HandGeneration(engine)
        engine.add("a")
        engine.sample("a")
        generation._progress()
        listening = asyncio.ensure_future(heard(generation.batch([request(7)]), 6 * PULSE_S))
        for step in range(5):
            await asyncio.sleep(PULSE_S)
            engine.add(f"new{step}")
            if step == 2:
                engine.end("a")  # its caller gave it up
        return await listening

    assert asyncio.run(main()) == []


def test_results_end_a_batch() -> None:
    async def main() -> list[Any]:
        generation = HandGeneration(HandEngine())
        generation.finished.set()
        return [message async for message in generation.batch([request(1), request(2)])]

    (results,) = asyncio.run(main())
    assert sorted(result.key for result in results) == [1, 2]
