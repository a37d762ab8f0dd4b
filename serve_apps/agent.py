"""Agents and tools: what a workflow's author declares, and what a call to one gives back."""

from __future__ import annotations

import string
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from serve_apps.contracts import Contract, Raw
from stores.types import Sampling


class TracedText(str):
    """Text that remembers which events (turns or tool calls) it came from, so that the next prompt's parents are known."""

    origins: frozenset[int] = frozenset()

    @classmethod
    def by(cls, text: str, *origins: int) -> TracedText:
        """`text`, said in these events."""
        traced_text = cls(text)
        traced_text.origins = frozenset(origins)
        return traced_text

    @classmethod
    def joined(cls, *parts: str) -> TracedText:
        """All parts as one text, which remembers where each of them came from."""
        return cls.by("".join(parts), *origins_of(parts))


def origins_of(value: Any) -> frozenset[int]:
    """The events that a text, or what a list or mapping holds, came from."""
    if isinstance(value, TracedText):
        return value.origins
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, str) or not isinstance(value, Iterable):
        return frozenset()
    return frozenset().union(*map(origins_of, value))


def traced(value: Any, origin: int) -> Any:
    """The same text or data, whose texts remember the event that said them."""
    if isinstance(value, str):
        return TracedText.by(value, origin)
    if isinstance(value, Mapping):
        return {key: traced(item, origin) for key, item in value.items()}
    return [traced(item, origin) for item in value] if isinstance(value, list) else value


_attempts: ContextVar[list[int]] = ContextVar("attempts")


def count_attempt() -> None:
    """A tool that tries again calls this before each try: the trace then says how many there were."""
    counter = _attempts.get(None)
    if counter is not None:
        counter[0] += 1


@contextmanager
def counted_attempts() -> Iterator[list[int]]:
    """A list whose one number is how often `count_attempt` was called inside."""
    token = _attempts.set([0])
    try:
        yield _attempts.get()
    finally:
        _attempts.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an agent answered: `reply["answer"]` is a field of its contract, empty where the agent left it out."""

    turn_index: int
    text: TracedText
    fields: Mapping[str, TracedText]
    is_format_ok: bool
    is_truncated: bool
    data: Mapping[str, Any] = field(default_factory=dict)
    """Of a contract that reads data (JSON): what was found, as it is."""

    def __getitem__(self, name: str) -> TracedText:
        try:
            return self.fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r} in this agent's contract; it has {', '.join(self.fields)}") from None


@dataclass(frozen=True)
class Agent:
    """A role: prompt template, output contract and sampling settings.

    `prompt` and `system` are `str.format` templates over the keyword arguments of the call (double braces escape).
    """

    prompt: str
    contract: Contract = Raw()  # noqa: RUF009 - frozen and without state
    system: str = ""
    max_tokens: int = 512
    temperature: float = 1.0
    cut: tuple[str, ...] = ()
    """Inputs that lose text where the prompt has no room, the least needed first. Instructions are never cut."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.cut if name not in self.inputs]
        if unknown:
            raise ValueError(f"Agent.cut names {unknown}, which its templates do not have: {sorted(self.inputs)}")

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the keyword arguments a call must give."""
        parts = [*string.Formatter().parse(self.system), *string.Formatter().parse(self.prompt)]
        return frozenset(name for _, name, _, _ in parts if name)

    @property
    def sampling(self) -> Sampling:
        """The agent's own sampling; a run config may change it."""
        return Sampling(max_tokens=self.max_tokens, temperature=self.temperature)

    def messages(self, inputs: Mapping[str, str]) -> list[dict[str, str]]:
        """Chat messages for these inputs; ValueError names inputs that are missing or not in the template."""
        if inputs.keys() != self.inputs:
            missing, extra = self.inputs - inputs.keys(), inputs.keys() - self.inputs
            raise ValueError(
                f"agent call with wrong inputs: missing {sorted(missing)}, not in the prompt {sorted(extra)}"
            )
        system = [{"role": "system", "content": self.system.format(**inputs)}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt.format(**inputs)}]

    def introduced(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A caller's chat messages, after the agent's own system message where it is a plain text and they have none."""
        if not self.system or "{" in self.system or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    def with_sampling(self, sampling: Sampling, **changes: Any) -> Sampling:
        """`sampling` with the changes that are not None."""
        return replace(sampling, **{k: v for k, v in changes.items() if v is not None})


@dataclass(frozen=True)
class Tool:
    """An async function that a workflow calls through `tools.<name>(...)`; every call is recorded.

    Arguments are checked against its annotations: what does not fit is a failed call, which names the argument.
    """

    function: Callable[..., Awaitable[Any]]
    timeout_s: float = 30.0
    unrecorded: tuple[str, ...] = ()
    """Arguments that a call's record only names: what the trace holds elsewhere, or is too large."""
    fail_open: bool = False
    """A failed call is recorded with its error, and the workflow goes on with `fallback`."""
    fallback: Any = ""

    async def __call__(self, **arguments: Any) -> Any:
        """Calls the function with checked arguments; ToolError names those that do not fit."""
        try:
            return await self._checked(**arguments)
        except ValidationError as error:
            first = error.errors()[0]
            argument = ".".join(map(str, first["loc"])) or "arguments"
            raise ToolError(f"{argument}: {first['msg']} (got {str(first['input'])[:80]!r})") from None

    @cached_property
    def _checked(self) -> Callable[..., Awaitable[Any]]:
        settings = ConfigDict(arbitrary_types_allowed=True, revalidate_instances="never")
        return validate_call(self.function, config=settings)  # type: ignore[call-overload]


class ToolError(Exception):
    """A tool failed: the episode becomes `tool_error`."""
