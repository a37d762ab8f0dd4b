"""client: what an agent and a collector need of a policy, how a call can fail, and what is counted of calls."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Protocol

from serve_apps.engines.port import CONTEXT, REFUSED, Piece
from stores.types import Completion, FinishReason, GenerateRequest


class PolicyCallError(Exception):
    """Raised where a model call failed for infrastructure reasons at its last attempt: the episode becomes infra_error."""


class ContextExhausted(Exception):
    """Raised where the prompt leaves too little room in the context. Repeating the call cannot help."""


class RequestRefused(ValueError):
    """Raised where the engine refuses the request itself (a token id beyond the vocabulary, a bad setting): a bug of
    the caller."""


def is_cancelled() -> bool:
    """Returns whether the task that runs this was cancelled, and not one that it waits for, as a call of Serve is."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def completion_of(piece: Piece, request: GenerateRequest, *, num_attempts: int = 1) -> Completion:
    """Returns the completion that an engine answered a request with; raises ContextExhausted or RequestRefused."""
    if piece.finish_reason == CONTEXT:
        raise ContextExhausted(f"request {request.request_id!r}: {piece.error}")
    if piece.finish_reason == REFUSED:
        raise RequestRefused(f"request {request.request_id!r}: {piece.error}")
    return Completion(
        token_ids=piece.token_ids,
        logprobs=piece.logprobs,
        finish_reason=FinishReason(piece.finish_reason),
        policy_version=piece.policy_version,
        is_version_mixed=piece.is_version_mixed,
        num_attempts=num_attempts,
        num_cached_tokens=piece.num_cached_tokens,
        allowed_logprobs=piece.allowed_logprobs,
    )


class PolicyClient(Protocol):
    """Defines what an agent needs of a policy."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Returns one completion; raises PolicyCallError, ContextExhausted or RequestRefused."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCounts:
    """Counts what became of a client's calls since it was made."""

    num_calls: int = 0
    """Calls that were answered."""
    num_late: int = 0
    """Attempts that were repeated because nothing came for `call_timeout_s`."""
    num_lost: int = 0
    """Attempts that were repeated because a replica or its engine failed."""
    num_tokens: int = 0
    """Completion tokens sampled, as far as the engines have reported them; those of repeated attempts, too."""

    def __add__(self, other: CallCounts) -> CallCounts:
        return CallCounts(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def __sub__(self, other: CallCounts) -> CallCounts:
        return CallCounts(**{name: value - getattr(other, name) for name, value in asdict(self).items()})


class CountingClient(PolicyClient, Protocol):
    """Defines what a collector needs of a policy."""

    @property
    def counts(self) -> CallCounts:
        """Returns what became of the calls until now."""
        ...
