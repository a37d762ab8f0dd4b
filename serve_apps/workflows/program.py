"""program: a program that uses OpenAI's API -> a workflow, which trains and serves it unchanged.

    workflow:
      path: "serve_apps.workflows.program:Program"
      settings:
        command: [python, my_agent.py, "{prompt}"]     # or function: "my_package.my_agent:answer", or container: {image: ...}
        agents: {assistant: {max_tokens: 256}}

The program finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment and calls agents as models; several agents may also
have a base URL each. Its output is the answer, unless it, or a grader, posts an outcome.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from serve_apps.authoring.agent import Agent, AuthorError
from serve_apps.authoring.contracts import Raw
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.policy.client import ContextExhausted
from serve_apps.program.container import Container
from serve_apps.program.episode import ProgramEpisode
from serve_apps.program.process import Ended, ProgramError, run_process
from serve_apps.program.server import SOCKET, EpisodeServer, episode_server
from serve_apps.program.workers import Workers, workers_of_loop
from serve_apps.tools.reference_fields import public_task
from stores.by_name import open_by_name
from stores.team_code import own_folders
from stores.types import Task
from stores.urls import direct_hosts


class Program(Workflow):
    """Runs an unchanged program: every model call that it makes is a turn of its episode."""

    def __init__(
        self,
        agents: Mapping[str, Mapping[str, Any]],
        command: Sequence[str] | None = None,
        function: str | None = None,
        container: Mapping[str, Any] | None = None,
        answer: Literal["output", "last_line"] = "output",
        stdin: bool = False,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        inherit: Sequence[str] = (),
        stays: bool = False,
        host: str = "127.0.0.1",
        failure: Literal["error", "no_answer"] = "error",
    ) -> None:
        """Takes exactly one of `command`, `function` and `container`.

        Args:
            agents: their `max_tokens` and `temperature`, as of any agent.
            command: `{prompt}`, `{task_id}` and `{task}` (the task as JSON, without answers and tests, see `reference_fields.py`)
                are filled in.
            function: `module:name`, called as `function(prompt, client)`; async with an `openai.AsyncOpenAI`, otherwise in a
                process of its own with an `openai.OpenAI`. It returns the answer, or {"answer", "score", "metadata"}.
            container: {image, arguments, engine, options, network, forwarder_image}, see `serve_apps.program.container.Container`:
                what `docker run` (or another engine) starts, in a network in which the episode's API alone is in reach.
            answer: the part of the output that is the answer where no outcome was posted.
            stdin: the prompt is written to the program's standard input.
            folder: working directory of a command.
            environment: further variables.
            inherit: names of variables that a command gets from this process, beside PATH and HOME. It gets no others: the
                environment of a trainer has passwords of databases and buckets.
            stays: the command plays one episode after the other, as JSON lines: see `serve_apps.program.workers`.
            host: the address that programs reach this machine by; not for containers without a network.
            failure: what a program that fails after the model answered it makes of its episode. `error`: the worst outcome of
                the credit rule; `no_answer`: the rule judges an empty answer. A program none of whose calls was answered is a
                fault of the set-up in both cases.
        """
        sources = [
            name for name, value in (("command", command), ("function", function), ("container", container)) if value
        ]
        if len(sources) != 1:
            raise TypeError(f"needs one of command, function and container, got {' and '.join(sources) or 'none'}")
        if answer not in ("output", "last_line") or failure not in ("error", "no_answer"):
            raise TypeError(
                f"answer is 'output' or 'last_line', got {answer!r}; failure is 'error' or 'no_answer', got {failure!r}"
            )
        if stays and (not command or stdin or any(_FIELD.search(part) for part in command)):
            raise TypeError(
                "stays: true needs a command without {prompt}, {task} and stdin: it reads episodes as JSON lines"
            )
        self.agents = {
            name: Agent(prompt="{messages}", contract=Raw(), **settings) for name, settings in agents.items()
        }
        self.container = Container(**container) if container else None
        self.command = list(command or [])
        if self.container:
            self.command = self.container.run_command("NAME", self.container.network, [], self.container.arguments)
        self.function_path = function
        self.answer, self.stdin, self.folder, self.host, self.failure = answer, stdin, folder, host, failure
        self.environment, self.inherit = dict(environment or {}), tuple(inherit)
        self._function = open_by_name(function, place="workflow.settings.function") if function else None
        self._own_folders = own_folders()
        self.stays = stays

    @property
    def prompts(self) -> dict[str, str]:
        """The program has its own prompts: its identity stands for them in the team manifest."""
        return dict.fromkeys(self.agents, f"program {self._sha256}")

    @cached_property
    def _sha256(self) -> str:
        """The hash of the command and the files that it names, or of the function's file."""
        parts = [json.dumps(self.command).encode(), json.dumps(self.environment, sort_keys=True).encode()]
        if self._function is not None:
            parts.append(Path(inspect.getfile(inspect.unwrap(self._function))).read_bytes())  # not of its decorator
        files = [Path(self.folder or ".") / part for part in self.command]
        parts += [
            file.read_bytes() for file in files if os.path.isfile(file)
        ]  # a script after `-c` is too long for a name
        return sha256(b"\x1f".join(parts)).hexdigest()[:16]

    def preflight(self) -> list[str]:
        """Returns how the program is started; ValueError where it cannot be."""
        if self._function is not None:
            return [f"program: {self.function_path}"]
        folder, name = Path(self.folder or ".").absolute(), self.command[0]
        if not folder.is_dir():
            raise ValueError(f"workflow.settings.folder: {self.folder!r} is no folder on this machine")
        # What has no slash is looked for on PATH alone, as when it is started: on the program's own, where it has one.
        found = shutil.which(str(folder / name) if os.sep in name else name, path=self._named_variables().get("PATH"))
        if found is None:
            here = "is no file here and not on this machine's PATH"
            if (folder / name).is_file():
                here = "is a file that does not start by itself: make it executable and write ./ before it, or name its interpreter first"
            raise ValueError(f"workflow.settings: program {name!r} {here}")
        files = [part for part in self.command if not os.path.isabs(part) and Path(self.folder or ".", part).is_file()]
        where = (
            f" (found from this folder: {', '.join(files)}; to serve the team, give absolute paths)" if files else ""
        )
        return [f"program: {' '.join(self.command)}{where}"]

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the program's answer.

        Raises ProgramError where it failed, AuthorError where no call of it was answered, and the error of the engines
        where they failed.
        """
        episode = ProgramEpisode(recorder=agents.recorder, id=agents.episode.episode_id)
        is_isolated = self.container is not None and self.container.is_isolated
        server = await episode_server(SOCKET if is_isolated else self.host)
        with server.playing(episode) as url:
            result, error = await self._played(task, episode, server, url)
        if not episode.recorder.turns and not episode.exhausted:
            raise AuthorError(_without_answers(episode, result, error))
        if error and self.failure == "error" and not episode.exhausted:
            raise error
        said = "" if error is None else f"{type(error).__name__}: {error}"
        if episode.exhausted and not result.value and episode.outcome is None:
            raise ContextExhausted(f"{episode.exhausted}{'; then ' if said else ''}{said}")
        return episode.outcome_of(result.value, error=said)

    async def _played(
        self, task: Task, episode: ProgramEpisode, server: EpisodeServer, url: str
    ) -> tuple[_Result, Exception | None]:
        """Returns the program's result, or how it failed; raises the error of the engines where they failed."""
        playing = asyncio.ensure_future(self._play(task, episode, server, url))
        failing = asyncio.ensure_future(episode.is_over.wait())
        try:
            await asyncio.wait({playing, failing}, return_when=asyncio.FIRST_COMPLETED)
            if episode.failure is not None:
                raise episode.failure
            try:
                return playing.result(), None
            except Exception as error:  # noqa: BLE001 - whatever a user's function raises is its failure
                return _Result(value=""), error
        finally:
            playing.cancel()
            failing.cancel()
            await asyncio.gather(playing, failing, return_exceptions=True)

    async def _play(self, task: Task, episode: ProgramEpisode, server: EpisodeServer, url: str) -> _Result:
        if inspect.iscoroutinefunction(self._function):
            try:
                return _Result(value=await self._function(task.prompt, server.async_client(url, episode.token)))
            except SystemExit as left:  # it would end the event loop, and with it all episodes of the process
                raise ProgramError(f"the function called sys.exit({left.code!r})") from None
        if self._function is not None or self.stays:
            about = {
                "id": episode.id,
                "prompt": task.prompt,
                "task_id": task.task_id,
                "task": public_task(task),
                "base_url": url,
                "api_key": episode.token,
                "agents": {name: f"{url}/agents/{name}" for name in self.agents},
            }
            return _Result(value=await self._workers_of_loop().play(about))
        variables = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": episode.token,
            "TROUPE_EPISODE_URL": url,
            **{f"TROUPE_{name.upper()}_URL": f"{url}/agents/{name}" for name in self.agents},
            **self._named_variables(),
        }
        variables |= direct_hosts(variables, self.host)
        fields = {"prompt": task.prompt, "task_id": task.task_id, "task": json.dumps(public_task(task))}
        ended = await self._run(variables, fields, server)
        if ended.exit_code != 0:
            raise ProgramError(
                f"exit code {ended.exit_code}; {ended.error_tail.strip() or 'nothing on standard error'}"
            )
        text = ended.output.strip()
        answer = text.rpartition("\n")[2] if self.answer == "last_line" else text
        return _Result(value=answer, error_tail=ended.error_tail.strip())

    async def _run(self, variables: Mapping[str, str], fields: Mapping[str, str], server: EpisodeServer) -> Ended:
        """Runs the command or the container to its end. Args: fields: what `{prompt}` and its like stand for."""
        stdin = fields["prompt"] if self.stdin else None
        if self.container is None:
            command = [_filled(part, fields) for part in self.command]
            return await run_process(command, environment=variables, stdin=stdin, folder=self.folder)
        arguments = [_filled(part, fields) for part in self.container.arguments]
        async with self.container.started(server.folder, self._named_variables()) as (name, network):
            command = self.container.run_command(name, network, list(variables), arguments, has_stdin=self.stdin)
            return await run_process(command, environment=variables, stdin=stdin, folder=self.folder)

    def _named_variables(self) -> dict[str, str]:
        """Returns the variables that the configuration names."""
        return {name: os.environ[name] for name in self.inherit if name in os.environ} | self.environment

    def _workers_of_loop(self) -> Workers:
        """Returns the processes that play episodes of this event loop."""
        command, variables = self.command, self._named_variables()
        if self.function_path is not None:
            command = [sys.executable, "-P", "-m", "serve_apps.program.function_worker", self.function_path]
            folders = map(os.path.abspath, [*self._own_folders, *sys.path])
            variables = {"PYTHONPATH": os.pathsep.join(folders)} | variables
        variables |= direct_hosts(variables, self.host)
        return workers_of_loop(command, environment=variables, folder=self.folder, identity=self._sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """Holds what a program returned or printed, and the end of its standard error."""

    value: Any
    error_tail: str | None = None
    """None where the program has not ended with its episode."""


def _without_answers(episode: ProgramEpisode, result: _Result, error: Exception | None) -> str:
    """Says why a program of which no call was answered is no episode: its last refused call, and how it ended."""
    calls = f"no call of the program was answered, {episode.num_refused} were refused, the last with: {episode.refusal}"
    if not episode.num_refused:
        calls = (
            "the program made no model call that its episode could read: it must call the base URL in OPENAI_BASE_URL"
        )
    if error is not None:
        return f"{calls}; {type(error).__name__}: {error}"
    if result.error_tail is None:
        return f"{calls}; it returned {str(result.value)[:80]!r}"
    return f"{calls}; it ended with exit code 0; {result.error_tail or 'nothing on standard error'}"


_FIELD = re.compile(r"{(prompt|task_id|task)}")


def _filled(part: str, values: Mapping[str, str]) -> str:
    """Fills in the named fields; other braces stay, also those in the values."""
    return _FIELD.sub(lambda match: values[match[1]], part)
