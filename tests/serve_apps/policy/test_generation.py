"""What a replica tells about requests that are under way, on an engine that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from serve_apps.engines.port import NO_VERSION, REFUSED, AdapterRoom, Piece, Progress
from serve_apps.policy import generation as generation_module
from serve_apps.policy.generation import Generation
from serve_apps.policy.versions import Versions
from stores.types import GenerateRequest, ModelVersionRef, Sampling

pytestmark = pytest.mark.fast

PULSE_S = 0.02
MODEL = ModelVersionRef(model_group="g", version=0, uri="u", manifest_sha256="s")


class HandEngine:
    """Has the part of an engine that answers and tells what is under way; requests end when `finished` is set."""

    max_model_len = 512

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.asked: list[str] = []
        self.finished = asyncio.Event()
        self.num_looks = 0
        self.death: BaseException | None = None

    def sample(self, request_id: str) -> None:
        self.tokens[request_id] = self.tokens.get(request_id, 0) + 1

    def progress(self) -> Mapping[str, int]:
        self.num_looks += 1
        return self.tokens

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        self.asked.append(request.request_id)
        if request.is_streamed:
            yield Piece([1], [-1.0])
        await self.finished.wait()
        if self.death is not None:
            raise self.death
        yield Piece([1], [-1.0], "stop", 0)


def generation_of(engine: HandEngine) -> Generation:
    return Generation(engine, Versions(engine, MODEL, None))  # type: ignore[arg-type]


def request(key: int = 0, *, group: str = "g", is_streamed: bool = False) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model_group=group,
        prompt_token_ids=[1, 2],
        sampling=Sampling(max_tokens=4),
        seed=key,
        is_streamed=is_streamed,
    )


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
        listening = asyncio.ensure_future(heard(generation_of(engine).run([request(7)]), messages))

        def goes_on() -> bool:
            engine.sample("other")
            return len(messages) >= 2

        await until(goes_on)
        listening.cancel()
        return messages

    assert set(map(repr, asyncio.run(main()))) == {repr(Progress({}))}


def test_a_request_that_has_begun_comes_with_its_tokens() -> None:
    async def main() -> list[Any]:
        engine, messages = HandEngine(), list[Any]()
        listening = asyncio.ensure_future(heard(generation_of(engine).run([request(7), request(8)]), messages))
        await until(lambda: len(engine.asked) == 2)
        for _ in range(3):
            engine.sample("2")
        await until(lambda: bool(messages))
        listening.cancel()
        return messages

    assert asyncio.run(main()) == [Progress({1: 3})]


def test_requests_that_come_and_go_do_not_pass_for_progress_of_an_engine_that_hangs() -> None:
    async def main() -> list[Any]:
        engine, messages = HandEngine(), list[Any]()
        engine.sample("a")
        listening = asyncio.ensure_future(heard(generation_of(engine).run([request(7)]), messages))
        for looks in range(2, 8):
            await until(lambda looks=looks: engine.num_looks >= looks)  # type: ignore[misc]
            if looks == 4:
                del engine.tokens["a"]  # its caller gave it up
        listening.cancel()
        return messages

    assert asyncio.run(main()) == []


def test_results_end_a_call() -> None:
    async def main() -> list[Any]:
        engine = HandEngine()
        engine.finished.set()
        return [message async for message in generation_of(engine).run([request(1), request(2)])]

    pieces = [piece for message in asyncio.run(main()) if isinstance(message, list) for piece in message]
    assert sorted(pieces) == [(0, Piece([1], [-1.0], "stop", 0)), (1, Piece([1], [-1.0], "stop", 0))]


def test_pieces_of_a_stream_come_as_they_are_sampled() -> None:
    async def main() -> list[Any]:
        engine, messages = HandEngine(), list[Any]()
        async for message in generation_of(engine).run([request(is_streamed=True)]):
            messages.append(message)
            engine.finished.set()
        return messages

    assert asyncio.run(main()) == [[(0, Piece([1], [-1.0]))], [(0, Piece([1], [-1.0], "stop", 0))]]


def test_the_death_of_an_engine_ends_the_call() -> None:
    async def main() -> None:
        engine = HandEngine()
        engine.death = RuntimeError("gone")
        engine.finished.set()
        async for _ in generation_of(engine).run([request(), request()]):
            pass

    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(main())


def test_a_request_that_the_engine_cancels_by_itself_is_given_back() -> None:
    async def main() -> list[Any]:
        engine = HandEngine()
        engine.death = asyncio.CancelledError()
        engine.finished.set()
        async with asyncio.timeout(20):
            return [message async for message in generation_of(engine).run([request(is_streamed=True)])]

    pieces = [piece for message in asyncio.run(main()) if isinstance(message, list) for piece in message]
    assert pieces == [(0, Piece([1], [-1.0])), (0, Piece(finish_reason="abort"))]


def test_a_request_that_does_not_fit_says_by_how_much() -> None:
    async def main() -> Any:
        engine = HandEngine()
        engine.max_model_len = 5
        return [message async for message in generation_of(engine).run([request()])]

    (((_, piece),),) = asyncio.run(main())
    assert (piece.finish_reason, piece.policy_version) == ("context", NO_VERSION)
    assert piece.error == "prompt of 2 tokens + max_tokens 4 exceeds serve.max_model_len = 5 by 1"


def told(versions: Versions, group: str) -> tuple[str, int, str]:
    """Finish reason, version and error of a request to a group."""

    async def main() -> Any:
        generation = Generation(HandEngine(), versions)  # type: ignore[arg-type]
        return [message async for message in generation.run([request(group=group)])]

    (((_, piece),),) = asyncio.run(main())
    return piece.finish_reason, piece.policy_version, piece.error


def test_a_group_whose_adapter_could_not_be_loaded_is_not_answered_by_the_bare_base() -> None:
    room = AdapterRoom(model_groups=("solver",), max_rank=4, target_modules=())
    versions = Versions(SimpleNamespace(), MODEL, room)  # type: ignore[arg-type]
    assert told(versions, "solver") == ("abort", NO_VERSION, "no adapter of 'solver' is live: it is being loaded")
    versions.states["solver"].error = "no answer from s3://bucket"
    lost = ("abort", NO_VERSION, "no adapter of 'solver' is live: no answer from s3://bucket")
    assert told(versions, "solver") == lost, "another replica may answer"
    refused = (REFUSED, NO_VERSION, "no adapter of 'stranger' is live; groups are solver")
    assert told(versions, "stranger") == refused
