"""spans: how long each piece of work took, and below which other: the port by which episodes and the gateway tell it.

The classes here are told everything and do nothing. An extension that exports spans has classes of its own, which a process uses from
`begin_spans` on, where its settings name an endpoint.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from serve_apps.config import TelemetryConfig
from serve_apps.episode_spec import EpisodeSpec
from stores.by_name import open_by_name
from stores.extensions import extensions
from stores.types import ToolCall

T = TypeVar("T")


class Span:
    """A piece of work, as a block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def record(self, result: Any) -> None:
        """Takes what came of the work."""


class EpisodeSpans(Span):
    """One attempt at an episode; its result is the trace."""

    def hide_texts(self) -> None:
        """Leaves texts out of all that ends from now on, since a caller said that nothing may be stored."""

    def agent(self, name: str) -> Span:
        """Returns the span of an agent that the workflow calls."""
        return Span()

    def turn(self, agent: str, model_group: str) -> Span:
        """Returns the span of a model call; its result is the turn."""
        return Span()

    def tool(self, name: str) -> Span:
        """Returns the span of a tool that the workflow calls; its result is the call as it is recorded."""
        return Span()

    def used(self, call: ToolCall) -> None:
        """Takes a tool call that a program made by itself and that has just ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Says which team of the gateway answers a caller with an episode."""

    team: str
    team_version: int
    alias: str
    episode_id: str = ""
    """What callers know the episode by; empty: by its key."""
    hides_texts: bool = False
    """Whether the caller said that nothing may be stored."""


class Spans:
    """The spans of one process."""

    config = TelemetryConfig()

    def episode(self, spec: EpisodeSpec, *, workflow: str, attempt: int, served: Served | None) -> EpisodeSpans:
        """Returns the spans of an attempt at an episode. Args: workflow: its dotted path. served: None in training."""
        return EpisodeSpans()

    def model_call(self, call: Any, pieces: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Returns the pieces of a `ModelCall` of the gateway, with its span around them."""
        return pieces

    def outside(self) -> AbstractContextManager[None]:
        """Keeps what is begun inside, and outlives the current span, from belonging to it."""
        return nullcontext()

    def headers(self) -> dict[str, str]:
        """Returns the headers by which the receiver of a request lets its spans belong to the current one."""
        return {}

    def flush(self) -> None:
        """Waits for a moment until the spans that have ended are sent."""

    def end(self) -> None:
        """Sends what is left, in a moment, and takes no more."""


_spans = Spans()


def process_spans() -> Spans:
    """Returns the spans of this process."""
    return _spans


def use_spans(spans: Spans) -> None:
    """Has this process tell its work to these spans from now on, and ends those before."""
    global _spans
    before, _spans = _spans, spans
    before.end()


def begin_spans(config: TelemetryConfig, *, service: str) -> None:
    """Has this process export spans as `config` says, from now on; the same settings go on with the same export.

    ValueError where they cannot be followed. Args: service: the name of what runs here, where OTEL_SERVICE_NAME does not say it.
    """
    if process_spans().config == config:
        return
    use_spans(Spans())
    if not config.endpoint:
        return
    for extension in extensions():
        if extension.spans:
            use_spans(open_by_name(extension.spans, place=f"extension {extension.name}")(config, service=service))
            return
    raise ValueError(
        f"telemetry.endpoint = {config.endpoint!r}, and no extension that exports spans is installed: install troupe-rl again, or drop it"
    )
