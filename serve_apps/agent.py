"""Agents and tools: what a workflow's author declares, and what a call to one gives back."""

from __future__ import annotations

import string
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from serve_apps.contracts import Contract, Raw
from stores.types import Sampling


class Said(str):
    """Text that remembers which event (turn or tool call) it came from, so that the next prompt's parents are known."""

    origin: int | None = None

    @classmethod
    def by(cls, text: str, origin: int) -> Said:
        """`text`, said in event `origin`."""
        said = cls(text)
        said.origin = origin
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an agent answered: `reply["answer"]` is a field of its contract, empty where the agent left it out."""

    turn_index: int
    text: Said
    fields: Mapping[str, Said]
    is_format_ok: bool
    is_truncated: bool

    def __getitem__(self, name: str) -> Said:
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

    def with_sampling(self, sampling: Sampling, **changes: Any) -> Sampling:
        """`sampling` with the changes that are not None."""
        return replace(sampling, **{k: v for k, v in changes.items() if v is not None})


@dataclass(frozen=True)
class Tool:
    """An async function that a workflow calls through `tools.<name>(...)`; every call is recorded."""

    function: Callable[..., Awaitable[Any]]
    timeout_s: float = 30.0


class ToolError(Exception):
    """A tool failed: the episode becomes `tool_error`."""
