"""mcp_tools: tools of a real MCP server in its own process, called as a workflow's tools."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from one_group import saying, start

from pipelines.runners.validate import check_tools
from serve_apps.authoring.agent import Agent, Tool, ToolError, ToolFault
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.config import EpisodeConfig
from serve_apps.extensions.graphs.declared import Declared
from serve_apps.extensions.mcp_tools.mcp_server import McpServer
from serve_apps.extensions.mcp_tools.mcp_session import Session
from serve_apps.extensions.mcp_tools.mcp_tools import mcp_tool
from serve_apps.process_log import TAIL
from stores.traces.rows import episode_table, traces_of
from stores.types import Cause, EpisodeStatus, Task, Trace

pytestmark = [pytest.mark.nightly, pytest.mark.anyio]

COMMAND = [sys.executable, "-m", "tests.serve_apps.extensions.mcp_tools.notes_server"]
FOLDER = str(Path(__file__).parents[4])


def tool(name: str, *, more: Mapping[str, Any] | None = None, **settings: Any) -> Tool:
    return mcp_tool(name, {"command": COMMAND, "folder": FOLDER, **settings}, **(more or {}))


class Scene(Workflow):
    """Asks its agent, and then calls tools in turn, as the task says."""

    chooser = Agent(prompt="{question}")

    def __init__(self, tools: dict[str, Tool]) -> None:
        self.tools = tools

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        await agents.chooser(question=task.prompt)
        said = [await tools[name](**arguments) for name, arguments in task.metadata["calls"]]
        return Outcome(answer=" ".join(said))


async def played(workflow: Workflow, *calls: tuple[str, dict[str, Any]], attempts: int = 1) -> Trace:
    """Plays an episode of a workflow whose task is to make these calls."""
    task = Task(task_id="t1", prompt="p", answers=(), source="s", metadata={"calls": calls})
    limits = EpisodeConfig(turn_timeout_s=60, episode_timeout_s=60, max_attempts=attempts)
    trace = await start(workflow, saying(lambda call: "go"), task=task, limits=limits)
    (stored,) = traces_of(episode_table([trace]).to_batches()[0])
    assert [call.version for call in stored.tool_calls] == [call.version for call in trace.tool_calls]
    return trace


@pytest.mark.test
async def test_a_tool_answers_and_its_call_is_recorded_with_what_answered() -> None:
    trace = await played(Scene({"add": tool("add")}), ("add", {"a": 2, "b": 3}))
    (call,) = trace.tool_calls
    assert (trace.status, trace.answer, call.response, call.error) == (EpisodeStatus.OK, "5", "5", "")
    assert call.version.startswith("notes 1.2, schema ") and call.request == {"a": 2, "b": 3}


@pytest.mark.test
async def test_a_file_in_an_answer_is_given_to_the_workflow() -> None:
    trace = await played(Scene({"download": tool("download")}), ("download", {"name": "moon"}))
    text = "downloaded 1 file\n[resource file:///moon]\nThe moon is far.\n[resource_link file:///moon.pdf: as a PDF]"
    assert (trace.answer, trace.tool_calls[0].response) == (text, text)


@pytest.mark.test
async def test_an_answer_of_another_form_than_its_tool_says_is_given_and_costs_no_server() -> None:
    weather = mcp_tool(
        "weather", {"command": [*COMMAND[:2], f"{COMMAND[2].rpartition('.')[0]}.odd_server"], "folder": FOLDER}
    )
    first, second = [await weather() for _ in range(2)]
    assert first == second and first.endswith(": not known"), "of one process"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("add", {"a": "two", "b": 3}), "a: 'two' is not of type 'integer'"),
        (("add", {"a": 2}), "arguments: 'b' is a required property"),
        (("fail", {"why": "no such planet"}), "Error executing tool fail"),
    ],
)
async def test_what_the_arguments_caused_is_the_policys(call: tuple[str, dict[str, Any]], said: str) -> None:
    trace = await played(Scene({"add": tool("add"), "fail": tool("fail")}), call, attempts=3)
    assert (trace.status, trace.cause, trace.attempt) == (EpisodeStatus.TOOL_ERROR, Cause.POLICY, 1)
    assert said in trace.error


@pytest.mark.test
async def test_a_server_that_is_killed_in_mid_episode_is_infrastructure_and_starts_again() -> None:
    tools = {name: tool(name) for name in ("pid", "die", "remember")}
    first = await played(Scene(tools), ("pid", {}))
    lost = await played(Scene(tools), ("pid", {}), ("die", {}), attempts=2)
    assert (lost.status, lost.cause, lost.attempt) == (EpisodeStatus.TOOL_ERROR, Cause.INFRASTRUCTURE, 2)
    assert "went away: die has no answer" in lost.error
    again = await played(Scene(tools), ("pid", {}))
    assert again.status is EpisodeStatus.OK and again.answer != first.answer
    psutil.Process(int(again.answer)).kill()  # between two episodes
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(again.answer)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    after = await played(Scene(tools), ("pid", {}), attempts=2)
    assert after.status is EpisodeStatus.OK and after.answer not in (first.answer, again.answer)


async def test_a_policy_that_can_bring_a_server_down_pays_for_it() -> None:
    crashing = tool("die", more={"timeout_cause": Cause.POLICY})
    trace = await played(Scene({"die": crashing}), ("die", {}), attempts=3)
    assert (trace.cause, trace.attempt) == (Cause.POLICY, 1)


async def test_episodes_share_a_session_or_have_their_own_which_ends_with_them() -> None:
    shared = Scene({"remember": tool("remember"), "pid": tool("pid")})
    assert [(await played(shared, ("remember", {"text": "x"}))).answer for _ in range(2)] == ["1", "2"]
    own = Scene({name: tool(name, session="episode") for name in ("remember", "pid")})
    both = await asyncio.gather(
        *(played(own, ("remember", {"text": "x"}), ("remember", {"text": "y"}), ("pid", {})) for _ in range(2))
    )
    answers = [trace.answer.split() for trace in both]
    assert [a[:2] for a in answers] == [["1", "2"], ["1", "2"]] and answers[0][2] != answers[1][2]
    deadline = time.monotonic() + 15
    while any(psutil.pid_exists(int(a[2])) for a in answers):
        assert time.monotonic() < deadline, "a session outlives its episode"
        await asyncio.sleep(0.1)
    with pytest.raises(RuntimeError, match="no episode is being played here"):
        await tool("pid", session="episode")()


async def test_a_tool_whose_schema_changes_between_episodes_is_said_and_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "changed"
    add = mcp_tool("add", {"command": [*COMMAND, str(file)], "folder": FOLDER, "session": "episode"})
    before = await played(Scene({"add": add}), ("add", {"a": 2, "b": 3}))
    file.touch()
    with caplog.at_level(logging.WARNING):
        after = await played(Scene({"add": add}), ("add", {"a": 2, "b": 3}))
    assert "tool add of the MCP server" in caplog.text and "another schema than before" in caplog.text
    assert after.error.endswith("arguments: 'c' is a required property") and after.cause is Cause.POLICY
    assert before.tool_calls[0].version != after.tool_calls[0].version


async def test_a_slow_tool_ends_at_its_deadline_and_later_calls_are_answered() -> None:
    tools = {"sleep": tool("sleep", more={"timeout_s": 1.0}), "pid": tool("pid")}
    first = await played(Scene(tools), ("pid", {}))
    late = await played(Scene(tools), ("sleep", {"seconds": 60}))
    assert "no answer after 1 s" in late.error and late.cause is Cause.INFRASTRUCTURE
    after = await played(Scene(tools), ("pid", {}))
    assert (first.status, after.status) == (EpisodeStatus.OK, EpisodeStatus.OK)


async def test_a_server_that_starts_slowly_is_there_for_the_call_after_the_one_that_gave_up() -> None:
    slow = ["sh", "-c", f"sleep 3; exec {' '.join(COMMAND)}"]
    tools = {"pid": mcp_tool("pid", {"command": slow, "folder": FOLDER}, timeout_s=1.0)}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await tools["pid"]()
    async with asyncio.timeout(30):
        assert int(await tools["pid"]()) > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command": ["/no/such/program"]}, "did not start: FileNotFoundError"),
        (
            {"command": [sys.executable, "-c", "import sys; sys.exit('no licence')"]},
            "did not start: .*it said: no licence",
        ),
        (
            {"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_timeout_s": 1},
            "no answer within 1 s",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "did not start: "),
        ({"command": COMMAND, "folder": FOLDER}, "has no tool 'missing'; its tools are add, die"),
    ],
)
async def test_a_server_that_cannot_be_used_is_infrastructures_and_says_why(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ToolFault, match=said):
        await mcp_tool("missing", settings)()


def test_validate_starts_the_server_and_says_what_it_is(tmp_path: Path) -> None:
    graph = tmp_path / "graph.yaml"
    graph.write_text("nodes:\n  kept: {type: tool, tool: pid}\nstart: [kept]\nend: [kept]\nanswer: '{kept}'\n")
    server = {"command": COMMAND, "folder": FOLDER}
    (note,) = check_tools(Declared(str(graph), tools={"pid": {"mcp": server}}))
    assert note.startswith("tool pid: notes 1.2, schema ")
    missing = Declared(str(graph), tools={"pid": {"mcp": server, "tool": "gone"}})
    with pytest.raises(ValueError, match=r"tool pid: .* has no tool 'gone'; its tools are add, die"):
        check_tools(missing)


@pytest.mark.test
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "mcp: give `command`, or the `url` of a running server"),
        ({"command": ["x"], "url": "http://h/mcp"}, "mcp: give `command`, or the `url`"),
        ({"url": "http://me:secret@h/mcp"}, "the url holds a password: .* token_variable"),
        ({"command": ["x"], "sesion": "episode"}, r"mcp\.sesion: Extra inputs are not permitted"),
    ],
)
def test_settings_that_name_no_server_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        mcp_tool("add", settings)


async def test_a_server_gets_the_variables_that_are_named_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    monkeypatch.setenv("WANTED", "w")
    named = {"environment": {"MORE": "m"}, "inherit": ["WANTED"]}
    said = [await tool("variable", **named)(name=name) for name in ("SECRET", "WANTED", "MORE")]
    assert said == ['{"result": ""}', "w", "m"], "of an answer without text the data"


@pytest.mark.test
async def test_a_declared_workflow_names_its_tools_by_their_server(tmp_path: Path) -> None:
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        "nodes:\n  kept: {type: tool, tool: keep, arguments: {text: '{question}'}}\nstart: [kept]\nend: [kept]\nanswer: '{kept}'\n"
    )
    server = {"command": COMMAND, "folder": FOLDER}
    workflow = Declared(str(graph), tools={"keep": {"mcp": server, "tool": "remember"}})
    assert (await workflow.tools["keep"](text="x")) == "1"
    with pytest.raises(TypeError, match=r"workflow\.settings\.tools\.keep: mcp: give `command`"):
        Declared(str(graph), tools={"keep": {"mcp": {}}})


async def test_a_server_at_a_url_is_called_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    from tests.serve_apps.extensions.mcp_tools.notes_server import SERVER, add

    seen: list[str] = []
    if "add" not in {t.name for t in await SERVER.list_tools()}:
        SERVER.add_tool(add, name="add")
    app = SERVER.streamable_http_app()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(value.decode() for name, value in scope.get("headers", ()) if name == b"authorization")
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(watched, port=0, log_level="error", lifespan="on"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    monkeypatch.setenv("NOTES_TOKEN", "t0ken")
    reached = mcp_tool("add", {"url": f"http://127.0.0.1:{port}/mcp", "token_variable": "NOTES_TOKEN"})
    assert await reached(a=2, b=3) == "5"
    with pytest.raises(ToolError, match="is not of type"):
        await reached(a="x", b=3)
    assert set(seen) == {"Bearer t0ken"} and os.getpid()
    server.should_exit = True
    await asyncio.wait_for(serving, 20)


async def test_what_a_server_logs_is_kept_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that writes and writes to standard error fills no disk, and what it said last is told."""
    monkeypatch.setattr("serve_apps.extensions.mcp_tools.mcp_session.CHECK_S", 0.2)
    server = McpServer(command=tuple(COMMAND), folder=FOLDER)
    session = Session(server)
    assert await session.call("log", {"mebibytes": 6}) == "logged"
    (file,) = {Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_large(fd)}
    async with asyncio.timeout(30):
        while file.stat().st_size > TAIL:
            await asyncio.sleep(0.05)
    with pytest.raises(ToolFault, match=r"it said: x+the end$"):
        await session.call("die", {})
    session.close()


def _is_large(fd: str) -> bool:
    try:
        stat = os.stat(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return stat.st_nlink == 0 and stat.st_size > 2**22
