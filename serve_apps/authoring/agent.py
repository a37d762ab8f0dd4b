"""agent: the agents and tools that a workflow's author declares, and what a call to one returns."""

from __future__ import annotations

import string
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError, validate_call

from serve_apps.authoring.choices import OFFERED, Choice
from serve_apps.authoring.contracts import Contract, Raw, Thinking
from stores.types import Cause, Sampling


class TracedText(str):
    """Text that remembers which events (turns or tool calls) it came from, so that the next prompt's parents are known."""

    origins: frozenset[int] = frozenset()

    @classmethod
    def by(cls, text: str, *origins: int) -> TracedText:
        """Returns `text`, marked as coming from these events."""
        traced_text = cls(text)
        traced_text.origins = frozenset(origins)
        return traced_text

    @classmethod
    def joined(cls, *parts: str) -> TracedText:
        """Joins the parts to one text, which remembers the events of all of them."""
        return cls.by("".join(parts), *origins_of(parts))


def origins_of(value: Any) -> frozenset[int]:
    """Returns the events that a text, or the texts in a list or mapping, came from."""
    if isinstance(value, TracedText):
        return value.origins
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, str) or not isinstance(value, Iterable):
        return frozenset()
    return frozenset().union(*map(origins_of, value))


def traced(value: Any, origin: int) -> Any:
    """Returns the same text or data, with every text marked as coming from the event `origin`."""
    if isinstance(value, str):
        return TracedText.by(value, origin)
    if isinstance(value, Mapping):
        return {key: traced(item, origin) for key, item in value.items()}
    return [traced(item, origin) for item in value] if isinstance(value, list) else value


_attempts: ContextVar[list[int]] = ContextVar("attempts")


def count_attempt() -> None:
    """Counts one attempt.

    A tool that repeats its work calls this before each attempt, and the trace then holds their number.
    """
    counter = _attempts.get(None)
    if counter is not None:
        counter[0] += 1


_version: ContextVar[list[str]] = ContextVar("version")


def note_version(version: str) -> None:
    """Says what answers a tool's call, for its record: a server, its version, what it takes."""
    noted = _version.get(None)
    if noted is not None:
        noted[0] = version


@contextmanager
def noted_version() -> Iterator[list[str]]:
    """Yields a list of one text: the last that `note_version` was given inside the block."""
    token = _version.set([""])
    try:
        yield _version.get()
    finally:
        _version.reset(token)


@contextmanager
def counted_attempts() -> Iterator[list[int]]:
    """Yields a list of one number: how often `count_attempt` was called inside the block."""
    token = _attempts.set([0])
    try:
        yield _attempts.get()
    finally:
        _attempts.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Holds what an agent answered: `reply["answer"]` is a field of its contract, empty where the agent left it out."""

    turn_index: int
    text: TracedText
    fields: Mapping[str, TracedText]
    is_format_ok: bool
    is_truncated: bool
    data: Mapping[str, Any] = field(default_factory=dict)
    """The values that a contract for data (JSON) read, unchanged; empty for other contracts."""
    num_tokens: int = 0
    """Completion tokens that were sampled for it."""

    def __getitem__(self, name: str) -> TracedText:
        try:
            return self.fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r} in this agent's contract; it has {', '.join(self.fields)}") from None


COLDEST = 0.01
"""The lowest temperature above 0 at which vLLM samples: it takes lower ones for this one, and the trainer would not know."""


@dataclass(frozen=True)
class Agent:
    """Declares a role: its prompt template, output contract and sampling settings.

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
        if self.temperature < 0 or 0 < self.temperature < COLDEST:
            raise ValueError(
                f"Agent.temperature = {self.temperature:g}: vLLM samples no colder than {COLDEST:g}, but for 0, which is greedy: "
                f"give 0, or {COLDEST:g} and above"
            )
        for part in ("system", "prompt"):
            try:
                names = _names_in(getattr(self, part))
            except ValueError as fault:
                raise ValueError(f"Agent.{part}: {fault}: write a brace of the text itself twice") from None
            if odd := [name for name in names if not name.isidentifier()]:
                raise ValueError(
                    f"Agent.{part}: {{{odd[0]}}} names no input: write the name of one, and a brace of the text itself twice"
                )
        unknown = [name for name in self.cut if name not in self.inputs]
        if unknown:
            raise ValueError(f"Agent.cut names {unknown}, which its templates do not have: {sorted(self.inputs)}")
        if isinstance(self.contract, Choice) and OFFERED in self.cut:
            raise ValueError(f"Agent.cut: {OFFERED!r} must not be cut: what is offered could be chosen and not be read")
        if isinstance(self.contract, Thinking) and isinstance(self.contract.contract, Choice):
            raise ValueError(
                "Agent.contract: Thinking(Choice(...)): a choice is one token, before which nothing can be thought"
            )
        if isinstance(self.contract, Choice) and OFFERED not in self.inputs:
            raise ValueError(
                f"Agent.prompt: {{{OFFERED}}} is missing, where the prompt of a Choice lists what is offered"
            )

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the keyword arguments that a call must pass."""
        return frozenset(_names_in(self.system) + _names_in(self.prompt))

    @property
    def sampling(self) -> Sampling:
        """The agent's own sampling settings; a run config may change them."""
        return Sampling(max_tokens=self.max_tokens, temperature=self.temperature)

    def messages(self, inputs: Mapping[str, str]) -> list[dict[str, str]]:
        """Returns the chat messages for these inputs; ValueError names inputs that are missing or not in the template."""
        if inputs.keys() != self.inputs:
            missing, extra = self.inputs - inputs.keys(), inputs.keys() - self.inputs
            raise ValueError(
                f"agent call with wrong inputs: missing {sorted(missing)}, not in the prompt {sorted(extra)}"
            )
        system = [{"role": "system", "content": self.system.format(**inputs)}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt.format(**inputs)}]

    def introduced(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Puts the agent's own system message before a caller's chat messages, where it has no inputs and they have
        none."""
        if not self.system or _names_in(self.system) or messages[0]["role"] == "system":
            return list(messages)
        return [{"role": "system", "content": self.system.format()}, *messages]

    def with_sampling(self, sampling: Sampling, **changes: Any) -> Sampling:
        """Returns `sampling` with those of the changes that are not None."""
        return replace(sampling, **{k: v for k, v in changes.items() if v is not None})


def _names_in(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


@dataclass(frozen=True)
class Tool:
    """Declares an async function that a workflow calls through `tools.<name>(...)`; every call is recorded.

    Arguments are checked against its annotations: where one does not fit the call fails, and the error names it.
    """

    function: Callable[..., Awaitable[Any]]
    timeout_s: float = 30.0
    unrecorded: tuple[str, ...] = ()
    """Arguments whose values are left out of the record of a call, because the trace holds them elsewhere or they
    are too large."""
    fail_open: bool = False
    """True: a failed call is recorded with its error, and the workflow goes on with `fallback`."""
    fallback: Any = ""
    timeout_cause: Literal[Cause.INFRASTRUCTURE, Cause.POLICY] = Cause.INFRASTRUCTURE
    """Who caused it where no answer comes within `timeout_s`. Say `policy` for a tool that a model's text can make slow, as
    one that runs code: otherwise such episodes are left out of training, and a policy may learn to have them left out."""

    is_stateful: bool = False
    """Whether a response depends on earlier calls, and not on the arguments alone. Demonstrations and variants refuse such a tool, because
    they take responses from a record: declare an `Environment`, which is played again."""
    probe: Callable[[], Coroutine[Any, Any, str]] | None = None
    """What `troupe validate` calls: it returns what answers, or raises ToolFault."""

    async def __call__(self, **arguments: Any) -> Any:
        """Calls the function with checked arguments; ToolError names those that do not fit."""
        try:
            return await self._checked(**arguments)
        except ValidationError as error:
            # The function itself may check something, too: that error is not of the arguments.
            if error.title != getattr(self._checked, "__qualname__", ""):
                raise
            first = error.errors()[0]
            argument = ".".join(map(str, first["loc"])) or "arguments"
            raise ToolError(f"{argument}: {first['msg']} (got {str(first['input'])[:80]!r})") from None

    @cached_property
    def _checked(self) -> Callable[..., Awaitable[Any]]:
        settings = ConfigDict(arbitrary_types_allowed=True, revalidate_instances="never")
        return validate_call(self.function, config=settings)  # type: ignore[call-overload]


class ToolError(Exception):
    """Raised by a tool that refuses its input: the episode ends with status `tool_error`, caused by the policy."""


class ToolFault(ToolError):
    """Raised by a tool whose service failed, whatever its input: the same status, caused by the infrastructure."""


class ToolRaised(ToolError):
    """Raised in place of another error of a tool: what a model wrote, or a bug of the tool."""


class AuthorError(Exception):
    """Raised where a workflow, a program or its set-up is wrong whatever a model wrote: the episode is no outcome."""
