"""Spans of episodes: the workflow's, and below it those of agents, model calls and tools; without texts unless they are asked for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from one_group import saying, start
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
)
from pair import Pair
from seen_spans import exported, spans_of, tree_of

from serve_apps.authoring.agent import Agent, Tool, ToolError
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.episode.team import AgentCall
from serve_apps.extensions.telemetry import names
from serve_apps.extensions.telemetry.spans import MAX_TEXT, messages
from serve_apps.policy.client import PolicyCallError
from serve_apps.spans import Served, process_spans
from stores.types import EpisodeStatus, Task
from tests.serve_apps.episode.test_runner import PAIR, Broken, play

pytestmark = pytest.mark.fast

SECRET = "twelve and a half"
PLAYED = [
    (
        "invoke_workflow flow",
        [("invoke_agent writer", ["chat g"]), "execute_tool double", ("invoke_agent reader", ["chat g"])],
    )
]


def says(call: AgentCall) -> str:
    return "<ANSWER>12</ANSWER>"


async def _refuse(number: str) -> str:
    raise ToolError(f"no {SECRET} for {number}")


async def _wait() -> None:
    await asyncio.sleep(600)


def test_an_episode_has_a_span_with_one_for_each_agent_model_call_and_tool() -> None:
    with exported() as memory:
        trace = play(PAIR, says)
        spans = spans_of(memory)
    assert tree_of(spans) == PLAYED and len({span.trace_id for span in spans}) == 1
    workflow, _, call, tool, *_ = spans
    assert workflow.attributes == {
        "gen_ai.operation.name": "invoke_workflow",
        "gen_ai.provider.name": "troupe",
        "gen_ai.agent.name": "flow",
        "gen_ai.response.id": trace.episode_id,
        "troupe.workflow": "tests:flow",
        "troupe.attempt": 1,
        "troupe.episode_id": trace.episode_id,
        "troupe.task_id": "t",
        "troupe.run_id": "r",
        "troupe.iteration": 1,
        "troupe.purpose": "train",
        "troupe.status": "ok",
        "troupe.stop_reason": "finished",
    }
    (turn, _), (recorded,) = trace.turns, trace.tool_calls
    assert call.kind == "CLIENT" and workflow.kind == tool.kind == "INTERNAL"
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "g",
        "gen_ai.agent.name": "writer",
        "gen_ai.request.max_tokens": 32,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.seed": turn.seed,
        "gen_ai.response.model": "g@3",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len(turn.prompt_token_ids),
        "gen_ai.usage.output_tokens": len(turn.completion_token_ids),
        "troupe.policy_version": 3,
        "troupe.is_format_ok": True,
    }
    assert call.attributes.items() >= expected.items()
    assert tool.attributes["gen_ai.tool.name"] == recorded.tool == "double"
    assert not any(span.is_error for span in spans)


@pytest.mark.parametrize("texts", [False, True])
def test_texts_stand_in_spans_only_where_they_are_asked_for(texts: bool) -> None:
    workflow = Pair(Tool(_refuse, timeout_s=1))
    with exported(texts=texts) as memory:
        trace = play(workflow, says)
        spans = spans_of(memory)
    assert trace.status is EpisodeStatus.TOOL_ERROR and SECRET in trace.error
    everything = repr(spans)
    assert [text in everything for text in (SECRET, "<ANSWER>", "Compute 3 * 4")] == [texts] * 3
    episode, _, call, tool = spans
    assert (tool.is_error, tool.attributes["error.type"], bool(tool.message)) == (True, "ToolError", texts)
    assert (episode.is_error, episode.attributes["error.type"]) == (True, "tool_error")
    if texts:
        (turn,) = trace.turns
        assert call.attributes["gen_ai.input.messages"] == messages("user", [turn.prompt_text])
        assert call.attributes["gen_ai.output.messages"] == messages("assistant", ["<ANSWER>12</ANSWER>"], ["stop"])
        assert tool.attributes["gen_ai.tool.call.arguments"] == '{"number": "12"}'


def test_what_ends_after_texts_were_hidden_says_nothing_of_an_error() -> None:
    served = Served(team="demo", team_version=1, alias="champion", episode_id="e")
    spec: Any = None  # `served` names the episode
    with exported(texts=True) as memory:
        with (
            suppress(ToolError),
            process_spans().episode(spec, workflow="a:Flow", attempt=1, served=served) as spans,
            spans.agent("writer"),
        ):
            with suppress(ToolError), spans.tool("before"):
                raise ToolError(SECRET)
            with spans.turn("writer", "g"):
                spans.hide_texts()
                raise ToolError(SECRET)
        said = {span.name: span.message for span in spans_of(memory)}
    assert said == {
        "execute_tool before": SECRET,
        "chat g": "",
        "invoke_agent writer": "",
        "invoke_workflow demo": "",
    }


@pytest.mark.parametrize("count", [1, 16])
def test_long_texts_are_cut_to_their_ends(count: int) -> None:
    shown = messages("user", [f"{'a' * 1_000_000}the end"] * count)
    assert len(shown) < MAX_TEXT + 100 * count and shown.count("the end") == count


def test_what_a_workflow_raises_is_a_failure_named_by_its_status() -> None:
    with exported() as memory:
        trace = play(Broken(), says)
        episode = spans_of(memory)[0]
    assert "no such field" in trace.error and "no such field" not in repr(episode)
    assert (episode.attributes["error.type"], episode.attributes["troupe.stop_reason"]) == (
        "agent_error",
        "workflow_raised",
    )


def test_each_attempt_of_an_episode_has_spans_of_its_own() -> None:
    left = ["fails"]

    def fails_once(call: AgentCall) -> str:
        if left:
            raise PolicyCallError(left.pop())
        return says(call)

    with exported() as memory:
        trace = play(PAIR, fails_once)
        spans = spans_of(memory)
    assert trace.attempt == 2
    first, second = [span for span in spans if span.name == "invoke_workflow flow"]
    assert (first.attributes["troupe.attempt"], first.attributes["error.type"]) == (1, "infra_error")
    assert (second.attributes["troupe.attempt"], second.is_error) == (2, False)
    failed = next(span for span in spans if span.name == "chat g")
    assert failed.attributes["error.type"] == "PolicyCallError" and "troupe.policy_version" not in failed.attributes


def test_the_spans_of_an_episode_that_is_given_up_end_as_cancelled() -> None:
    class Waits(Workflow):
        """Waits for a tool that never answers."""

        writer = Agent(prompt="{question}")
        wait = Tool(_wait, timeout_s=600)

        async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
            began.set()
            return Outcome(answer=await tools.wait())

    began = asyncio.Event()

    async def give_up() -> None:
        episode = asyncio.ensure_future(start(Waits(), saying(says)))
        await began.wait()
        episode.cancel()
        await asyncio.wait({episode})

    with exported() as memory:
        asyncio.run(give_up())
        spans = spans_of(memory)
    assert tree_of(spans) == [("invoke_workflow flow", ["execute_tool wait"])]
    assert {span.attributes["error.type"] for span in spans} == {"cancelled"}


def test_episodes_side_by_side_have_traces_of_their_own() -> None:
    async def both() -> None:
        await asyncio.gather(*(start(PAIR, saying(says), index=index) for index in range(2)))

    with exported() as memory:
        asyncio.run(both())
        spans = spans_of(memory)
    assert tree_of(spans) == PLAYED * 2
    assert len({(span.trace_id, span.attributes["troupe.episode_id"]) for span in spans}) == 2


def test_attributes_have_the_names_of_the_conventions() -> None:
    """Those of generative AI as far as the package still has them; it keeps some that have moved as deprecated."""
    ours = {value for name, value in vars(names).items() if name.isupper() and "." in str(value)}
    packages = (
        gen_ai_attributes,
        error_attributes,
        http_attributes,
        network_attributes,
        server_attributes,
        url_attributes,
    )
    known = {value for package in packages for name, value in vars(package).items() if name.isupper()}
    assert {name for name in ours if not name.startswith("troupe.")} - known == set()
    assert len(ours & known) > 30
    operations = {value.value for value in gen_ai_attributes.GenAiOperationNameValues}
    assert {"chat", "text_completion", "invoke_agent", "invoke_workflow", "execute_tool"} <= operations


def test_without_spans_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, serve_apps.episode.runner, serve_apps.gateway.calls.model_call\n"
        "import serve_apps.extensions.telemetry.extension\n"
        "from serve_apps.config import TelemetryConfig\n"
        "from serve_apps.spans import begin_spans, process_spans\n"
        "begin_spans(TelemetryConfig(sample=0.5), service='tests'); process_spans().flush()\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    root = Path(__file__).parents[4]
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
