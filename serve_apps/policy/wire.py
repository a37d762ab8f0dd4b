"""wire: what crosses a Serve handle between a client and a policy app. Named tuples, which pickle as small as bare ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stores.types import Sampling

CONTEXT = "context"
"""Finish reason of a request whose prompt and `max_tokens` exceed the context."""
REFUSED = "refused"
"""Finish reason of a request that the engine cannot run at all."""
NO_VERSION = -1
"""Policy version of a request that nothing was sampled for."""


class WireRequest(NamedTuple):
    """Asks for one completion."""

    key: int
    """The caller's own number; it comes back with the result."""
    prompt_token_ids: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    model_group: str
    seed: int
    constraint: str = ""
    """As `Sampling.constraint`."""


class WireResult(NamedTuple):
    """Holds one whole completion, or the error."""

    key: int
    token_ids: list[int]
    logprobs: list[float]
    """The logprob of each token, under the weights that sampled it."""
    finish_reason: str
    """A `FinishReason`, or CONTEXT or REFUSED, where the request cannot run and `error` says why."""
    policy_version: int
    """The version that sampled the last token; NO_VERSION where the request cannot run."""
    is_version_mixed: bool
    """True if the weights changed while it was sampled."""
    error: str
    num_cached_tokens: int = 0
    """How many tokens of the prompt came from the engine's prefix cache."""
    allowed_logprobs: Sequence[float] = ()
    """As `Completion.allowed_logprobs`."""


class WireProgress(NamedTuple):
    """Says that the engine has sampled something since the last message, whoever asked for it."""

    num_tokens: dict[int, int]
    """By key, the tokens sampled so far of each request that the engine has begun on and not finished."""


class WireDelta(NamedTuple):
    """Holds what is new of a streamed completion."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    """The logprobs of the most likely tokens at each token's position, where the request asks for them."""
    finish_reason: str
    """As in WireResult; empty while more follows."""
    policy_version: int
    error: str


def wire_request(
    key: int,
    prompt_token_ids: Sequence[int],
    sampling: Sampling,
    *,
    model_group: str,
    seed: int,
) -> WireRequest:
    """Returns the request with these sampling settings."""
    return WireRequest(
        key=key,
        prompt_token_ids=prompt_token_ids,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        model_group=model_group,
        seed=seed,
        constraint=sampling.constraint,
    )
