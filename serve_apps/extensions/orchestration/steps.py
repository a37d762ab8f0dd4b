"""steps: the settings of an orchestrator's options -> steps, checked against the team that they call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_apps.authoring.agent import Agent, Tool
from serve_apps.extensions.graphs.templates import fields_of

STOP, MESSAGE, QUESTION = "stop", "message", "question"
"""The option that is always there, and the names on the board of a message to a step and of the task."""
ORCHESTRATOR = "orchestrator"


class StepSpec(BaseModel):
    """Describes what one option of the orchestrator does: an agent, a tool, an agent whose reply goes to a tool, or other steps side by side."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent: str = ""
    """An agent of the team. Its inputs are what the board has under their names, empty where it has nothing."""
    tool: str = ""
    """A tool of the team; with `agent` it is called after it."""
    arguments: dict[str, str] = Field(default_factory=dict)
    """The tool's arguments, as templates over the board; one that is a single `{name}` passes the value on."""
    result: str = ""
    """The name on the board of what the tool returns; empty: the tool's name."""
    together: tuple[str, ...] = ()
    """Names of other steps, which are taken side by side."""
    needs: tuple[str, ...] = ()
    """Names that must be on the board, and not be empty, for the step to be offered."""
    writes: dict[str, str] = Field(default_factory=dict)
    """By field of the agent's contract, the name on the board where it is not the field's own."""
    adds: tuple[str, ...] = ()
    """Names on the board to which this step adds a line, where others are replaced."""
    max_calls: int | None = Field(None, ge=1)
    """How often it may be taken in an episode."""
    about: str = ""
    """What the orchestrator is told of the option."""
    message: bool = False
    """Whether the orchestrator writes a message to it, which is on the board as `message`."""


Steps: TypeAlias = Mapping[str, StepSpec]


def read_steps(
    settings_of: Mapping[str, Mapping[str, Any]], agents: Mapping[str, Agent], tools: Mapping[str, Tool]
) -> dict[str, StepSpec]:
    """Returns the steps by their names. Raises TypeError for the first that does not fit the team."""
    if not settings_of:
        raise TypeError("steps: name one at least")
    steps = {name: _step(name, settings) for name, settings in settings_of.items()}
    for name in steps:
        _check(name, steps, agents, tools)
    return steps


def check_names(
    steps: Steps, agents: Mapping[str, Agent], tools: Mapping[str, Tool], *, answer: str, shows: Sequence[str]
) -> None:
    """Raises TypeError for names that nothing writes on the board, and for arguments that a tool does not take."""
    writable = {QUESTION, MESSAGE} | {name for step in steps.values() for name in writes_of(step, agents)}
    read = {"answer": [answer], "shows": list(shows)}
    for name, step in steps.items():
        read[f"steps.{name}.needs"] = list(step.needs)
        read[f"steps.{name}.arguments"] = [field for text in step.arguments.values() for field in fields_of(text)]
        if step.tool:
            taken = signature(tools[step.tool].function).parameters
            has_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
            if odd := [key for key in step.arguments if key not in taken and not has_any]:
                raise TypeError(f"steps.{name}.arguments: {step.tool} takes no {odd[0]!r}; it takes {', '.join(taken)}")
    for place, names in read.items():
        if unknown := [name for name in names if name not in writable]:
            raise TypeError(f"{place}: nothing writes {unknown[0]!r}; steps write {', '.join(sorted(writable))}")


def writes_of(step: StepSpec, agents: Mapping[str, Agent]) -> list[str]:
    """Returns the names on the board that a step may write."""
    fields = agents[step.agent].contract.field_names if step.agent else ()
    return [step.writes.get(name, name) for name in fields] + ([step.result or step.tool] if step.tool else [])


def _step(name: str, settings: Mapping[str, Any]) -> StepSpec:
    try:
        step = StepSpec.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["steps", name, *map(str, first["loc"])])
        raise TypeError(f"{place}: {first['msg'].lower()}") from None
    return step


def _check(name: str, steps: Steps, agents: Mapping[str, Agent], tools: Mapping[str, Tool]) -> None:
    step, place = steps[name], f"steps.{name}"
    if name == STOP:
        raise TypeError(f"{place}: {STOP!r} is there by itself")
    if bool(step.together) == bool(step.agent or step.tool):
        raise TypeError(f"{place}: give `agent`, `tool` or both, or the names of other steps as `together`")
    if step.agent and step.agent not in agents:
        raise TypeError(f"{place}.agent: no agent {step.agent!r}; the team has {', '.join(agents)}")
    if step.tool and step.tool not in tools:
        raise TypeError(f"{place}.tool: no tool {step.tool!r}; the team has {', '.join(tools) or 'none'}")
    single = [other for other, of in steps.items() if not of.together and not of.message]
    if odd := [other for other in step.together if other not in single]:
        raise TypeError(
            f"{place}.together = {odd}: these are no steps of an agent or a tool without a message; there are {single}"
        )
    if len(set(step.together)) < len(step.together):
        raise TypeError(f"{place}.together = {list(step.together)}: a step stands twice")
    idle: Sequence[str] = ()
    if step.together:
        idle = ("writes", "adds", "message", "arguments", "result")
    elif not step.tool:
        idle = ("arguments", "result")
    elif not step.agent:
        idle = ("writes",)
    if odd := [key for key in idle if getattr(step, key)]:
        raise TypeError(f"{place}.{odd[0]}: it does nothing here")
    if step.agent and (odd := sorted(set(step.writes) - set(agents[step.agent].contract.field_names))):
        raise TypeError(
            f"{place}.writes = {odd}: fields of {step.agent} are {', '.join(agents[step.agent].contract.field_names)}"
        )
    if QUESTION in writes_of(step, agents):
        raise TypeError(
            f"{place}.writes: the task stands on the board as {QUESTION!r}: give the agent's field another name"
        )
