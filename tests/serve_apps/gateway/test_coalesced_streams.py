"""Completions that nobody reads live: concurrent requests share a call, and each gets its own answer or error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from serve_apps.engines.port import Piece
from serve_apps.openai_api.protocol import ApiError
from serve_apps.policy.policy_stream import CoalescedStreams
from stores.types import GenerateRequest, Sampling

pytestmark = [pytest.mark.test, pytest.mark.anyio]


ABOUT: dict[str, Any] = {"is_version_mixed": True, "num_cached_tokens": 3, "allowed_logprobs": (-0.5, -1.0)}


class Handle:
    """A handle of `Policy.generate`: prompt [i] is answered by i and its seed, or by the fault that `faults` has for it."""

    def __init__(self, **faults: str) -> None:
        self.faults = {int(key.removeprefix("of_")): fault for key, fault in faults.items()}
        self.batches: list[list[Any]] = []

    def remote(self, batch: list[Any]) -> AsyncIterator[list[Any]]:
        self.batches.append(batch)
        return self._results(batch)

    async def _results(self, batch: list[Any]) -> AsyncIterator[list[Any]]:
        for place, item in enumerate(batch):
            prompt = item.prompt_token_ids
            fault = self.faults.get(prompt[0])
            if fault == "dies":
                raise ConnectionError("the replica is gone")
            if fault:
                yield [(place, Piece(finish_reason=fault, policy_version=7, error=f"it is {fault}"))]
            else:
                yield [(place, Piece([prompt[0], item.seed], [-0.5, -0.25], "length", 7, **ABOUT))]


class Single:
    """PolicyStreams that record their requests."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.num_open = 0

    async def stream(self, app: str, request: GenerateRequest) -> AsyncGenerator[Piece]:
        self.requests.append(request)
        self.num_open += 1
        try:
            for reason in ("", "stop"):
                yield Piece(token_ids=[1], logprobs=[-1.0], finish_reason=reason, policy_version=2)
        finally:
            self.num_open -= 1


def request(i: int = 0, *, group: str = "g", is_streamed: bool = False, **more: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model_group=group,
        prompt_token_ids=[i],
        sampling=Sampling(max_tokens=4, temperature=0.5),
        seed=100 + i,
        is_streamed=is_streamed,
        **more,
    )


async def deltas(streams: CoalescedStreams, asked: GenerateRequest, app: str = "app") -> list[Piece]:
    return [delta async for delta in streams.stream(app, asked)]


async def test_concurrent_requests_to_one_app_share_a_call() -> None:
    handles = {"blue": Handle(), "green": Handle()}
    single = Single()
    streams = CoalescedStreams(timeout_s=5, single=single, open_app=lambda app: handles[app])
    asks = [("blue" if i % 2 else "green", request(i)) for i in range(5)]
    answers = await asyncio.gather(*(deltas(streams, one, app) for app, one in asks))
    assert [len(batch) for batch in handles["green"].batches] == [3]
    assert [len(batch) for batch in handles["blue"].batches] == [2]
    assert answers == [
        [
            Piece(
                token_ids=[i, 100 + i],
                logprobs=[-0.5, -0.25],
                finish_reason="length",
                policy_version=7,
                **ABOUT,
            )
        ]
        for i in range(5)
    ]
    assert single.requests == []


async def test_requests_name_their_model_group_to_an_app_that_several_share() -> None:
    handle = Handle()
    streams = CoalescedStreams(timeout_s=5, open_app=lambda _: handle)
    await asyncio.gather(deltas(streams, request(1, group="g")), deltas(streams, request(2, group="h")))
    assert sorted((item.prompt_token_ids[0], item.model_group) for batch in handle.batches for item in batch) == [
        (1, "g"),
        (2, "h"),
    ]


@pytest.mark.parametrize(
    "asked",
    [
        request(is_streamed=True),
        request(top_logprobs=3),
        request(settings={"presence_penalty": 0.5}),
    ],
    ids=["watched", "likely tokens", "penalty"],
)
async def test_requests_that_need_a_stream_of_their_own_get_one(asked: GenerateRequest) -> None:
    handle, single = Handle(), Single()
    streams = CoalescedStreams(timeout_s=5, single=single, open_app=lambda _: handle)
    assert [delta.finish_reason for delta in await deltas(streams, asked)] == ["", "stop"]
    assert single.requests == [asked] and handle.batches == []
    first = streams.stream("app", asked)
    await anext(first)
    await first.aclose()
    assert single.num_open == 0, "its sampling ends when its caller leaves"


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("context", 400, "context_length_exceeded"),
        ("refused", 400, "invalid_value"),
        ("dies", 503, "engine_unavailable"),
    ],
)
async def test_an_error_is_reported_as_by_a_stream_and_the_call_is_not_repeated(
    fault: str, status: int, code: str
) -> None:
    handle = Handle(of_2=fault)
    streams = CoalescedStreams(timeout_s=5, open_app=lambda _: handle)
    first, second = await asyncio.gather(
        deltas(streams, request(1)), deltas(streams, request(2)), return_exceptions=True
    )
    assert isinstance(first, list) and list(first[0].token_ids) == [1, 101]
    assert isinstance(second, ApiError) and (second.status, second.code) == (status, code)
    assert len(handle.batches) == 1
