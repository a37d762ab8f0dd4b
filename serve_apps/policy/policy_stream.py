"""policy_stream: a request in tokens -> the pieces of its completion from a policy app, over Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from serve_apps.config import SHORTEST_SILENCE_S, CallConfig
from serve_apps.engines.port import CONTEXT, REFUSED, Piece, Progress
from serve_apps.openai_api.protocol import ApiError
from serve_apps.policy.client import ContextExhausted, PolicyCallError, PolicyClient, RequestRefused, is_cancelled
from serve_apps.policy.serve_client import NO_REPLICA_S, NoReplica, ServeClient, open_serve_app, until_taken
from stores.types import GenerateRequest


class PolicyStreams(Protocol):
    """The source of completions."""

    def stream(self, app: str, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Yields pieces until one has a finish reason; closing the iterator ends the sampling. Raises ApiError."""
        ...


class ServeStreams:
    """PolicyStreams over Ray Serve, with a Serve call for each request."""

    def __init__(
        self, *, replica_timeout_s: float = NO_REPLICA_S, open_app: Callable[[str], Any] | None = None
    ) -> None:
        """Contacts nothing yet.

        Args:
            replica_timeout_s: how long a request waits for a replica where an app has none.
            open_app: application name -> streaming handle of `Policy.generate`; default asks Serve.
        """
        self._replica_timeout_s, self._open_app = replica_timeout_s, open_app or open_serve_app
        self._handles: dict[str, Any] = {}

    async def stream(self, app: str, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Streams a completion from one replica of `app`."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        response = None
        try:
            response = self._handle(app).remote([request])
            await until_taken(response, app, timeout_s=self._replica_timeout_s)
            async for message in response:
                for _, piece in () if isinstance(message, Progress) else message:
                    if piece.error:
                        raise _error(request, piece)
                    yield piece
        except NoReplica as error:
            raise _unavailable(request, str(error)) from error
        except (RayError, RayServeException) as error:
            self._handles.pop(app, None)
            raise _unavailable(request, type(error).__name__) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise _unavailable(request, "Serve cancelled the call") from None
        finally:
            if response is not None:
                response.cancel()  # ends the sampling; no effect where it has ended

    def _handle(self, app: str) -> Any:
        if app not in self._handles:
            self._handles[app] = self._open_app(app)
        return self._handles[app]


class CoalescedStreams:
    """PolicyStreams in which requests that come at the same time share a Serve call, for completions that nobody reads live.

    A request that needs a stream of its own (stop strings, settings, top logprobs, a caller who reads along) gets one.
    """

    def __init__(
        self, *, timeout_s: float, single: PolicyStreams | None = None, open_app: Callable[[str], Any] | None = None
    ) -> None:
        """Makes the clients; contacts nothing yet.

        Args:
            timeout_s: for which an engine may be silent; failed calls are not repeated.
            single: for requests that need a stream of their own; default: over Serve.
            open_app: see ServeClient.
        """
        silence_s = max(timeout_s, SHORTEST_SILENCE_S)  # whoever asks stops waiting earlier
        self._call, self._open_app = CallConfig(call_timeout_s=silence_s, max_attempts=1), open_app
        self._single = single or ServeStreams()
        self._clients: dict[tuple[str, str], PolicyClient] = {}

    async def stream(self, app: str, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """See PolicyStreams; closing the iterator does not end the sampling of requests that share a call."""
        if request.is_streamed or request.top_logprobs or request.settings:
            async with aclosing(self._single.stream(app, request)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        try:
            completion = await self._client(app, request.model_group).generate(request)
        except ContextExhausted as error:
            raise _too_long(str(error)) from error
        except RequestRefused as error:
            raise _refused(str(error)) from error
        except PolicyCallError as error:
            raise _unavailable(request, type(error.__cause__ or error).__name__) from error
        yield Piece(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason.value,
            policy_version=completion.policy_version,
            is_version_mixed=completion.is_version_mixed,
            num_cached_tokens=completion.num_cached_tokens,
            allowed_logprobs=completion.allowed_logprobs,
        )

    def _client(self, app: str, model_group: str) -> PolicyClient:
        key = app, model_group
        if key not in self._clients:
            self._clients[key] = ServeClient({model_group: app}, self._call, open_app=self._open_app)
        return self._clients[key]


def _error(request: GenerateRequest, piece: Piece) -> ApiError:
    if piece.finish_reason == CONTEXT:
        return _too_long(piece.error)
    return _refused(piece.error) if piece.finish_reason == REFUSED else _unavailable(request, piece.error)


def _too_long(message: str) -> ApiError:
    return ApiError(400, message, code="context_length_exceeded", param="messages")


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value")


def _unavailable(request: GenerateRequest, reason: str) -> ApiError:
    return ApiError(
        503,
        f"the engine of model group {request.model_group!r} is being replaced ({reason})",
        code="engine_unavailable",
        retry_after_s=2,
    )
