"""policy_stream: one request of a caller -> deltas of its completion from a policy app, over Ray Serve."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve_apps.policy_app import CONTEXT, REFUSED
from serve_apps.service.protocol import ApiError
from stores.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """What is to be sampled, in tokens."""

    model_group: str
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    seed: int
    top_logprobs: int = 0
    penalties: Mapping[str, float] = field(default_factory=dict)
    """`presence_penalty`, `frequency_penalty`, where they are not 0."""
    is_whole: bool = False
    """One delta, when all is sampled: nobody looks before, and it costs less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new of a completion."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[Mapping[int, float]]
    finish_reason: str
    """Empty while more follows."""
    policy_version: int


class PolicyStreams(Protocol):
    """Where completions come from."""

    def stream(self, app: str, request: SampleRequest) -> AsyncGenerator[Delta]:
        """Deltas until one has a finish reason; closing the iterator ends the sampling. Raises ApiError."""
        ...


class ServeStreams:
    """PolicyStreams over Ray Serve."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    async def stream(self, app: str, request: SampleRequest) -> AsyncGenerator[Delta]:
        """See PolicyStreams."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        s = request.sampling
        wire = (
            0,
            list(request.prompt_token_ids),
            *(s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p),
            request.model_group,
            request.seed,
        )
        more = {"top_logprobs": request.top_logprobs, "is_whole": request.is_whole, **request.penalties}
        response = None
        try:
            response = self._handle(app).remote(wire, more)
            async for token_ids, logprobs, top, finish_reason, version, error in response:
                if finish_reason == CONTEXT:
                    raise ApiError(400, error, code="context_length_exceeded", param="messages")
                if finish_reason == REFUSED:
                    raise ApiError(400, error, code="invalid_value")
                yield Delta(
                    token_ids=token_ids,
                    logprobs=logprobs,
                    top_logprobs=top,
                    finish_reason=finish_reason,
                    policy_version=version,
                )
        except (RayError, RayServeException) as error:
            self._handles.pop(app, None)
            raise ApiError(
                503,
                f"the engine of model group {request.model_group!r} is being replaced ({type(error).__name__})",
                code="engine_unavailable",
                retry_after_s=2,
            ) from error
        finally:
            if response is not None:
                response.cancel()  # no effect where it has ended

    def _handle(self, app: str) -> Any:
        from ray import serve

        if app not in self._handles:
            handle = serve.get_app_handle(app)
            self._handles[app] = handle.options(stream=True, method_name="generate_stream")
        return self._handles[app]
