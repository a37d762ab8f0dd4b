"""generation: the requests of a call -> their pieces as one engine samples them, and every PULSE_S how far it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from serve_apps.engines.port import CONTEXT, Engine, Piece, Progress
from serve_apps.policy.versions import Versions
from stores.types import FinishReason, GenerateRequest

FLUSH_S = 0.01
"""How long a finished completion waits for others before they are sent back in one message."""
PULSE_S = 3.0
"""How often a call is told how far it is, while the engine samples."""


class Generation:
    """Runs the calls of one engine. Every method raises EngineDeadError when the engine is gone."""

    def __init__(self, engine: Engine, versions: Versions) -> None:
        self._engine, self._versions = engine, versions
        self._num_requests = 0
        self.num_running = 0
        """The number of requests that are not finished."""
        self._looked_at = float("-inf")
        self._num_sampled, self._num_tokens = 0, dict[str, int]()

    async def run(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[list[tuple[int, Piece]] | Progress]:
        """Yields the pieces of the requests, each with its request's place in the call, several at a time and in no order.

        A request that cannot run comes back as an error by itself. In between, every `PULSE_S` seconds, comes how far the others are,
        as long as the engine samples anything: requests wait their turn behind those of other calls, and their caller must be able
        to tell that from an engine that hangs. Closing the iterator ends the sampling.
        """
        came: asyncio.Queue[tuple[int, Piece] | BaseException] = asyncio.Queue()
        named = {place: replace(request, request_id=self._next_id()) for place, request in enumerate(requests)}
        tasks = [asyncio.ensure_future(self._answer(place, request, came)) for place, request in named.items()]
        num_left = len(named)
        seen, pulse_at = self._progress()[0], time.monotonic() + PULSE_S
        try:
            while num_left:
                pieces = await self._next_pieces(came, pulse_at, may_wait=num_left > 1)
                num_left -= sum(bool(piece.finish_reason) for _, piece in pieces)
                if time.monotonic() >= pulse_at:
                    pulse_at = time.monotonic() + PULSE_S
                    before, (seen, num_tokens) = seen, self._progress()
                    if seen != before:
                        counts = {place: num_tokens.get(request.request_id) for place, request in named.items()}
                        yield Progress({place: num for place, num in counts.items() if num is not None})
                if pieces:
                    yield pieces
        finally:
            for task in tasks:
                task.cancel()

    async def _next_pieces(
        self, came: asyncio.Queue[tuple[int, Piece] | BaseException], until: float, *, may_wait: bool
    ) -> list[tuple[int, Piece]]:
        """Returns what came, once anything has; empty at the time `until`. Raises the error that ended a request."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                got = [await came.get()]
        except TimeoutError:
            return []
        # A piece of a stream has a reader who waits for it; what ended may be sent together with what ends next.
        if may_wait and not (isinstance(got[0], tuple) and not got[0][1].finish_reason):
            await asyncio.sleep(FLUSH_S)
        while not came.empty():
            got.append(came.get_nowait())
        pieces = []
        for one in got:
            if isinstance(one, BaseException):
                raise one
            pieces.append(one)
        return pieces

    async def _answer(
        self, place: int, request: GenerateRequest, came: asyncio.Queue[tuple[int, Piece] | BaseException]
    ) -> None:
        self.num_running += 1
        piece = Piece()
        try:
            async with aclosing(self._pieces(request)) as pieces:
                async for piece in pieces:
                    self._num_sampled += bool(piece.token_ids)
                    came.put_nowait((place, piece))
        except Exception as error:  # noqa: BLE001  raised again where the call waits
            came.put_nowait(error)
        finally:
            self.num_running -= 1
            if not piece.finish_reason:  # the engine ended or cancelled it: the call would wait for ever
                came.put_nowait((place, Piece(finish_reason=FinishReason.ABORT.value)))

    async def _pieces(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        if excess := self._excess(request):
            yield Piece(finish_reason=CONTEXT, error=excess)
        elif (answer := self._versions.why_unanswered(request.model_group)) is not None:
            yield answer
        else:
            async with aclosing(self._engine.generate(request)) as pieces:
                async for piece in pieces:
                    yield piece

    def _progress(self) -> tuple[int, dict[str, int]]:
        """Returns a count that grows whenever the engine samples, and the number of tokens of every request under way.

        Requests that come or are given up do not move the count: in an engine that hangs they would pass for progress.
        """
        now = time.monotonic()
        if now > self._looked_at + PULSE_S / 10:  # once for all calls
            before, self._num_tokens = self._num_tokens, dict(self._engine.progress())
            self._num_sampled += sum(max(0, n - before.get(i, 0)) for i, n in self._num_tokens.items())
            self._looked_at = now
        return self._num_sampled, self._num_tokens

    def _excess(self, request: GenerateRequest) -> str:
        """Returns why a request does not fit into the context; empty where it does."""
        num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        excess = num_prompt + max_tokens - self._engine.max_model_len
        if excess <= 0:
            return ""
        return (
            f"prompt of {num_prompt} tokens + max_tokens {max_tokens} exceeds serve.max_model_len = "
            f"{self._engine.max_model_len} by {excess}"
        )

    def _next_id(self) -> str:
        """Returns the engine's name of the next request."""
        self._num_requests += 1
        return str(self._num_requests)
