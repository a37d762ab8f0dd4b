"""orchestrated: an orchestrator chooses which agents and tools of a team act next, and when to stop.

    board {question} -> orchestrator: solve | check | stop -> the step -> what it wrote is on the board -> orchestrator -> ...

The orchestrator sees the task, the board (cut where there is no room), which steps were taken and how many are left. It is offered the steps
that can be taken now, and `stop` once there is an answer. Where one option is left, it is taken without asking.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve_apps.agent import Agent, Reply, TracedText, origins_of
from serve_apps.choices import OFFERED, Choice
from serve_apps.templates import FIELD, as_text, fill
from serve_apps.workflow import Outcome, Workflow, load_workflow, together
from stores.types import Task

ORCHESTRATOR, STOP, MESSAGE = "orchestrator", "stop", "message"
QUESTION = "question"
PROMPT = "Choose what comes next.\nTask: {question}\nKnown: {board}\nDone: {done}\nLeft: {left}\n{options}"
MESSAGE_TOKENS = 64


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


class Orchestrated(Workflow):
    """Puts the agents and tools of another workflow under an orchestrator. Its agents are `orchestrator` and those that its steps call."""

    def __init__(
        self,
        team: dict[str, Any],
        steps: dict[str, dict[str, Any]],
        answer: str = "answer",
        max_calls: int = 8,
        copies: dict[str, str] | None = None,
        shows: tuple[str, ...] | list[str] | None = None,
        prompt: str = PROMPT,
    ) -> None:
        """Sets the workflow up.

        Args:
            team: `path` and `settings` of the workflow whose agents and tools act.
            steps: by name of the option, see `StepSpec`.
            answer: the name on the board that holds the team's answer.
            max_calls: calls of agents and tools by steps, after which the episode ends.
            copies: further agents: by name, the agent of the team that they are copies of, so that they can be of another model group.
            shows: names on the board that the orchestrator sees; None: all.
            prompt: of the orchestrator, over `question`, `board`, `done`, `left` and `options`.

        Raises TypeError for steps that do not fit the team.
        """
        played = load_workflow(team.get("path", ""), team.get("settings", {}))
        if played.environments:
            raise TypeError(f"steps act on no world, and {team['path']!r} has {', '.join(played.environments)}")
        known = {**played.agents, **{name: _copied(played, name, of) for name, of in (copies or {}).items()}}
        if ORCHESTRATOR in known:
            raise TypeError(f"the team has an agent {ORCHESTRATOR!r}: this name is taken")
        self.steps = {name: _step(name, step) for name, step in steps.items()}
        self.tools = dict(played.tools)
        for name, step in self.steps.items():
            self._check(name, step, known)
        called = {step.agent for step in self.steps.values()} - {""}
        self._contract = Choice(
            {name: step.about for name, step in self.steps.items()} | {STOP: ""},
            messages=[name for name, step in self.steps.items() if step.message],
        )
        orchestrator = Agent(prompt=prompt, contract=self._contract, cut=("board",), max_tokens=MESSAGE_TOKENS)
        self.agents = {ORCHESTRATOR: orchestrator} | {name: a for name, a in known.items() if name in called}
        self._answer, self._max_calls, self._shows = answer, max_calls, shows

    @property
    def prompts(self) -> dict[str, str]:
        """The prompts of the agents, and the steps, which are part of the team's identity."""
        steps = {name: step.model_dump(mode="json") for name, step in self.steps.items()}
        return {**super().prompts, "steps": json.dumps([steps, self._answer, self._max_calls, self._shows])}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns what the board has as the answer when the orchestrator stops. Metadata: `steps`, those that were taken."""
        board: dict[str, Any] = {QUESTION: task.prompt}
        taken: list[str] = []
        reason = "max_calls"
        while (left := self._max_calls - self._num_calls(taken)) > 0:
            offered = self._offered(board, taken, left)
            chosen = await self._choose(offered, board, taken, left, agents)
            if chosen not in self.steps:  # a silenced orchestrator has chosen nothing
                reason = STOP
                break
            taken.append(chosen)
            await self._take(self.steps[chosen], board, agents, tools)
        return Outcome(answer=as_text(board.get(self._answer)), stop_reason=reason, metadata={"steps": taken})

    def _check(self, name: str, step: StepSpec, agents: Mapping[str, Agent]) -> None:
        place = f"steps.{name}"
        if name == STOP:
            raise TypeError(f"{place}: {STOP!r} is there by itself")
        if bool(step.together) == bool(step.agent or step.tool):
            raise TypeError(f"{place}: give `agent`, `tool` or both, or the names of other steps as `together`")
        if step.agent and step.agent not in agents:
            raise TypeError(f"{place}: no agent {step.agent!r}; the team has {', '.join(agents)}")
        if step.tool and step.tool not in self.tools:
            raise TypeError(f"{place}: no tool {step.tool!r}; the team has {', '.join(self.tools) or 'none'}")
        single = [other for other, of in self.steps.items() if not of.together]
        if unknown := [other for other in step.together if other not in single]:
            raise TypeError(
                f"{place}: together = {unknown}: these are no steps of an agent or a tool; there are {single}"
            )
        if step.agent and (odd := set(step.writes) - set(agents[step.agent].contract.field_names)):
            raise TypeError(
                f"{place}: writes = {sorted(odd)}: fields of {step.agent} are {', '.join(agents[step.agent].contract.field_names)}"
            )

    def _num_calls(self, taken: list[str]) -> int:
        return sum(len(self.steps[name].together) or 1 for name in taken)

    def _offered(self, board: Mapping[str, Any], taken: list[str], left: int) -> list[str]:
        """Returns the options of this moment; `stop` alone where nothing else can be done."""
        counts = Counter(part for name in taken for part in (name, *self.steps[name].together))

        def is_open(name: str) -> bool:
            step = self.steps[name]
            return (
                all(board.get(needed) for needed in step.needs)
                and (step.max_calls is None or counts[name] < step.max_calls)
                and len(step.together) <= left
                and all(map(is_open, step.together))
            )

        options = [name for name in self.steps if is_open(name)]
        return [*options, STOP] if not options or board.get(self._answer) else options

    async def _choose(self, offered: list[str], board: dict[str, Any], taken: list[str], left: int, agents: Any) -> str:
        if len(offered) == 1 and offered[0] not in self._contract.messages:
            return offered[0]
        state = {
            QUESTION: board[QUESTION],
            "board": self._shown(board),
            "done": ", ".join(taken),
            "left": str(left),
            OFFERED: offered,
        }
        read = self.agents[ORCHESTRATOR].inputs
        reply = await agents[ORCHESTRATOR](**{name: value for name, value in state.items() if name in read})
        if reply[MESSAGE]:
            board[MESSAGE] = reply[MESSAGE]
        return str(reply["choice"])

    def _shown(self, board: Mapping[str, Any]) -> str:
        """Returns the board as the orchestrator reads it, which remembers the events that wrote it."""
        names = [name for name in board if name != QUESTION] if self._shows is None else self._shows
        lines = [f"{name}: {as_text(board[name])}" for name in names if board.get(name)]
        return TracedText.by("; ".join(lines), *origins_of({name: board[name] for name in names if name in board}))

    async def _take(self, step: StepSpec, board: dict[str, Any], agents: Any, tools: Any) -> None:
        if step.together:
            before = dict(board)
            for written in await together(
                *(self._call(self.steps[name], before, agents, tools) for name in step.together)
            ):
                _write(board, written, [name for part in step.together for name in self.steps[part].adds])
        else:
            _write(board, await self._call(step, board, agents, tools), step.adds)

    async def _call(self, step: StepSpec, board: Mapping[str, Any], agents: Any, tools: Any) -> dict[str, Any]:
        """Returns what the agent and the tool of a step write, by name on the board."""
        written: dict[str, Any] = {}
        if step.agent:
            inputs = {name: as_text(board.get(name)) for name in self.agents[step.agent].inputs}
            reply: Reply = await agents[step.agent](**inputs)
            fields = {**reply.fields, **reply.data}
            written |= {step.writes.get(name, name): value for name, value in fields.items()}
        if step.tool:
            values = {**board, **written}
            arguments = {name: _argument(template, values) for name, template in step.arguments.items()}
            written[step.result or step.tool] = await tools[step.tool](**arguments)
        return written


def _copied(played: Workflow, name: str, of: str) -> Agent:
    if of not in played.agents:
        raise TypeError(f"copies.{name}: no agent {of!r}; the team has {', '.join(played.agents)}")
    return played.agents[of]


def _step(name: str, settings: Mapping[str, Any]) -> StepSpec:
    try:
        step = StepSpec.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise TypeError(f"steps.{name}.{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from None
    return step


def _write(board: dict[str, Any], written: Mapping[str, Any], adds: Any) -> None:
    for name, value in written.items():
        is_added = name in adds and board.get(name)
        board[name] = TracedText.joined(as_text(board[name]), "\n", as_text(value)) if is_added else value


def _argument(template: str, values: Mapping[str, Any]) -> Any:
    match = FIELD.fullmatch(template)
    return values.get(match[1]) if match else fill(template, values)
