"""port: what a policy app needs of an engine, and the records that cross to it.

    GenerateRequest ──> Engine.generate ──> Piece, Piece, ...     each with tokens, their logprobs, the version that sampled them
    sequences       ──> Engine.probe    ──> logprobs              the proof that it serves what it says
    a version       ──> Engine.load     ──> served from the next token on

An engine is a subclass of `Engine`: `serve.engine_kind` names one of `KINDS`, or a class by its dotted path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from serve_apps.config import ServeConfig
from stores.by_name import open_by_name
from stores.types import GenerateRequest, ModelVersionRef

CONTEXT = "context"
"""Finish reason of a request whose prompt and `max_tokens` exceed the context."""
REFUSED = "refused"
"""Finish reason of a request that the engine cannot run at all."""
NO_VERSION = -1
"""Policy version of a request that nothing was sampled for."""
UNUSABLE_FORM = "the engine can make no grammar of the form that is asked for: simplify it"

KINDS: Mapping[str, str] = {
    "vllm": "serve_apps.engines.vllm.engine:VllmEngine",
    "transformers": "serve_apps.engines.transformers_engine:TransformersEngine",
}
"""`serve.engine_kind` -> the class."""


class Piece(NamedTuple):
    """Holds the newest part of a completion, or why there is none. A named tuple, which pickles as small as a bare one."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """The logprob of each token, under the distribution and the weights that it was sampled from."""
    finish_reason: str = ""
    """Empty while more follows; then a `FinishReason`, or CONTEXT or REFUSED with an `error`."""
    policy_version: int = NO_VERSION
    """The version that sampled the last token."""
    error: str = ""
    top_logprobs: Sequence[Mapping[int, float]] = ()
    """As many of the most likely tokens at each token's position as the request asks for."""
    is_version_mixed: bool = False
    """True if the weights changed while it was sampled."""
    num_cached_tokens: int | None = None
    """How many tokens of the prompt came from the engine's prefix cache; None where it has none."""
    allowed_logprobs: Sequence[float] = ()
    """As `Completion.allowed_logprobs`."""


class Progress(NamedTuple):
    """Says that the engine has sampled something since the last message, whoever asked for it."""

    num_tokens: dict[int, int]
    """By its place in the call, the tokens sampled so far of each request that the engine has begun on and not finished."""


class EngineDeadError(Exception):
    """Raised by every method of an engine that is gone; whoever runs it starts another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """Describes the adapters that an engine has to have room for; plain values on the wire."""

    model_groups: tuple[str, ...]
    """The groups with one adapter each, all of one base."""
    max_rank: int
    target_modules: tuple[str, ...]
    """The layers that any of the adapters changes."""


class Engine(ABC):
    """Samples from one model whose weights change in place, or from the adapters of one base."""

    max_model_len: int
    """The longest context in tokens, prompt and completion together."""

    @abstractmethod
    def __init__(self, settings: ServeConfig, folder: Path, *, version: int, room: AdapterRoom | None = None) -> None:
        """Loads the model in `folder`, which is `version` of its group, or where there is `room` the base of several groups."""

    @classmethod
    @abstractmethod
    def environment(cls, settings: ServeConfig, *, threads: int) -> dict[str, str]:
        """Returns the environment variables of the process that it runs in. Args: threads: of an engine on a CPU."""

    async def begin(self) -> None:
        """Does what must happen in the event loop, once, before any other method is called."""
        return None

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Yields a completion in pieces if the request is streamed, else in one; closing the iterator ends the sampling.

        A request that cannot run yields a piece that says so. `request_id` is unique among those under way.
        """

    @abstractmethod
    def progress(self) -> Mapping[str, int]:
        """Returns the tokens sampled so far of the requests under way, by `request_id`; those that it has not begun on are left out."""

    @abstractmethod
    async def probe(self, sequences: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[list[float]]]:
        """Returns log p(seq[j+1] | seq[:j+1]) under the live weights, over all rows of the head, for each sequence of each model group.

        Nothing cached is read: it may be an older version's. A group that nothing is live for gets the base's logprobs.
        """

    @abstractmethod
    async def load(self, ref: ModelVersionRef, folder: Path) -> None:
        """Serves the weights in `folder` as `ref` from the next token on, and nothing cached under older ones.

        Raises ValueError for weights that do not fit, and then goes on with the old ones. Any other error leaves it broken.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Frees the memory of its GPU. Requests under way may be frozen; new ones wait."""

    @abstractmethod
    async def wake(self) -> None:
        """Takes the memory back and goes on with the weights of before and an empty cache. May fail where there is no room."""

    async def free_bytes(self) -> list[int]:
        """Returns the free memory of each of its GPUs in bytes; 0 for an engine on a CPU."""
        return [0]

    @abstractmethod
    async def health(self) -> None:
        """Raises EngineDeadError when it is gone."""

    def close(self) -> None:
        """Ends its processes, where it has some and whoever runs it does not end them with his own."""
        return None


def engine_class(kind: str, *, place: str = "serve.engine_kind") -> type[Engine]:
    """Returns the engine of `serve.engine_kind`. ValueError, naming `place`, for what is none or cannot be imported."""
    if ":" not in kind and kind not in KINDS:
        raise ValueError(f"{place} = {kind!r} is no engine: take {', '.join(KINDS)}, or a class as package.module:Name")
    found: type[Engine] = open_by_name(
        KINDS.get(kind, kind),
        place=place,
        wanted="a subclass of serve_apps.engines.port.Engine",
        fits=lambda found: isinstance(found, type) and issubclass(found, Engine),
    )
    return found
