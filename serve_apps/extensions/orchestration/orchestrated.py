"""orchestrated: an orchestrator chooses which agents and tools of a team act next, and when to stop.

    board {question} -> orchestrator: solve | check | stop -> the step -> what it wrote is on the board -> orchestrator -> ...

The orchestrator sees the task, the board (cut where there is no room), which steps were taken and how many are left. It is offered the steps
that can be taken now, and `stop` once there is an answer. Where one option is left, it is taken without asking, unless it carries a message.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serve_apps.authoring.agent import Agent, Reply, TracedText, origins_of, traced
from serve_apps.authoring.choices import OFFERED, Choice
from serve_apps.authoring.workflow import Outcome, Workflow, load_workflow, together
from serve_apps.extensions.graphs.templates import FIELD, as_text, fill
from serve_apps.extensions.orchestration.retrace import retrace
from serve_apps.extensions.orchestration.steps import (
    MESSAGE,
    ORCHESTRATOR,
    QUESTION,
    STOP,
    StepSpec,
    check_names,
    read_steps,
)
from stores.types import Task, Trace

PROMPT = "Choose what comes next.\nTask: {question}\nKnown: {board}\nDone: {done}\nLeft: {left}\n{options}"
MESSAGE_TOKENS = 64
STATE = frozenset({QUESTION, "board", "done", "left", OFFERED})
"""What the orchestrator's prompt may read."""


class Orchestrated(Workflow):
    """Puts the agents and tools of another workflow under an orchestrator. Its agents are `orchestrator` and those that its steps call."""

    retraced_agent = ORCHESTRATOR

    def __init__(
        self,
        team: dict[str, Any],
        steps: dict[str, dict[str, Any]],
        answer: str = "answer",
        max_calls: int = 8,
        copies: dict[str, str] | None = None,
        shows: Sequence[str] | None = None,
        prompt: str = PROMPT,
    ) -> None:
        """Sets the workflow up.

        Args:
            team: `path` and `settings` of the workflow whose agents and tools act.
            steps: by name of the option, see `steps.StepSpec`.
            answer: the name on the board that holds the team's answer.
            max_calls: calls of agents and tools by steps, after which the episode ends.
            copies: further agents: by name, the agent of the team that they are copies of, so that they can be of another model group.
            shows: names on the board that the orchestrator sees; None: all.
            prompt: of the orchestrator, over `question`, `board`, `done`, `left` and `options`.

        Raises TypeError for settings that do not fit the team.
        """
        if unknown := sorted(team.keys() - {"path", "settings"}):
            raise TypeError(f"team: unknown {', '.join(unknown)}: give `path` and `settings`")
        played = load_workflow(str(team.get("path", "")), team.get("settings", {}))
        if played.environments:
            raise TypeError(f"team: steps act on no world, and {team['path']!r} has {', '.join(played.environments)}")
        known = {**played.agents, **{name: _copied(played, name, of) for name, of in (copies or {}).items()}}
        if max_calls < 1:
            raise TypeError(f"max_calls = {max_calls}: give at least 1")
        self.tools = dict(played.tools)
        self.steps = read_steps(steps, known, self.tools)
        called = {step.agent for step in self.steps.values()} - {""}
        for name in sorted(
            {ORCHESTRATOR} & known.keys() | {n for n in called if isinstance(known[n].contract, Choice)}
        ):
            raise TypeError(f"team: agent {name!r} is an orchestrator itself: put those under one that it calls")
        self._answer, self._max_calls = answer, max_calls
        self._shows = None if shows is None else [shows] if isinstance(shows, str) else list(shows)
        check_names(self.steps, known, self.tools, answer=answer, shows=self._shows or ())
        self._contract = Choice(
            {name: step.about for name, step in self.steps.items()} | {STOP: ""},
            messages=[name for name, step in self.steps.items() if step.message],
        )
        orchestrator = Agent(prompt=prompt, contract=self._contract, max_tokens=MESSAGE_TOKENS)
        if unknown := sorted(orchestrator.inputs - STATE):
            raise TypeError(f"prompt: unknown {', '.join(unknown)}: it may have {', '.join(sorted(STATE))}")
        if "board" in orchestrator.inputs:
            orchestrator = replace(orchestrator, cut=("board",))
        self.agents = {ORCHESTRATOR: orchestrator} | {name: a for name, a in known.items() if name in called}

    @property
    def prompts(self) -> dict[str, str]:
        """The prompts of the agents, and the steps, which are part of the team's identity."""
        steps = {name: step.model_dump(mode="json") for name, step in self.steps.items()}
        return {**super().prompts, "steps": json.dumps([steps, self._answer, self._max_calls, self._shows])}

    def retraced(self, trace: Trace, *, team: Any, run_id: str, seed: int) -> Trace:
        """Returns the episode with the choices that lead to its calls, see `retrace`."""
        return retrace(trace, team=team, steps=self.steps, run_id=run_id, seed=seed)

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

    def _num_calls(self, taken: list[str]) -> int:
        """Returns the calls of agents and tools by these steps."""
        return sum(self._calls_of(self.steps[name]) for name in taken)

    def _calls_of(self, step: StepSpec) -> int:
        return sum(self._calls_of(self.steps[name]) for name in step.together) or bool(step.agent) + bool(step.tool)

    def _offered(self, board: Mapping[str, Any], taken: list[str], left: int) -> list[str]:
        """Returns the options of this moment; `stop` alone where nothing else can be done."""
        counts = Counter(part for name in taken for part in (name, *self.steps[name].together))

        def is_open(name: str) -> bool:
            step = self.steps[name]
            return (
                all(board.get(needed) for needed in step.needs)
                and (step.max_calls is None or counts[name] < step.max_calls)
                and self._calls_of(step) <= left
                and all(map(is_open, step.together))
            )

        options = [name for name in self.steps if is_open(name)]
        return [*options, STOP] if not options or board.get(self._answer) else options

    async def _choose(self, offered: list[str], board: dict[str, Any], taken: list[str], left: int, agents: Any) -> str:
        board[MESSAGE] = ""
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
        board[MESSAGE] = reply[MESSAGE] or ""
        return str(reply["choice"])

    def _shown(self, board: Mapping[str, Any]) -> str:
        """Returns the board as the orchestrator reads it, which remembers the events that wrote it."""
        names = [name for name in board if name not in (QUESTION, MESSAGE)] if self._shows is None else self._shows
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
            fields = {**reply.fields, **traced(reply.data, reply.turn_index)}
            written |= {step.writes.get(name, name): value for name, value in fields.items()}
        if step.tool:
            values = {**board, **written}
            arguments = {name: _argument(template, values) for name, template in step.arguments.items()}
            written[step.result or step.tool] = await tools[step.tool](**arguments)
        return written


def _copied(played: Workflow, name: str, of: str) -> Agent:
    if name in played.agents:
        raise TypeError(f"copies.{name}: the team has an agent of this name: give the copy another one")
    if of not in played.agents:
        raise TypeError(f"copies.{name}: no agent {of!r}; the team has {', '.join(played.agents)}")
    return played.agents[of]


def _write(board: dict[str, Any], written: Mapping[str, Any], adds: Sequence[str]) -> None:
    """Puts values on the board; an empty one, as of a completion without the field, leaves what stands there."""
    for name, value in written.items():
        if not value and board.get(name):
            continue
        is_added = name in adds and board.get(name)
        board[name] = TracedText.joined(as_text(board[name]), "\n", as_text(value)) if is_added else value


def _argument(template: str, values: Mapping[str, Any]) -> Any:
    match = FIELD.fullmatch(template)
    return values.get(match[1]) if match else fill(template, values)
