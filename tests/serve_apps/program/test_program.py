"""Programs that speak OpenAI's API as episodes: real processes, the real client over HTTP; the model's words are scripted."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from one_group import saying, start
from seen_spans import exported, spans_of

from pipelines.credit.posted_score import PostedScore
from pipelines.examples.calculator import program as calculator
from pipelines.examples.calculator.demonstrator import demonstrate
from pipelines.run.scoring import per_agent
from serve_apps.authoring.workflow import load_workflow
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.team import AgentCall
from serve_apps.openai_api import constraints
from serve_apps.openai_api.constraints import OVERLOADED
from serve_apps.policy.client import PolicyCallError, RequestRefused
from serve_apps.program.server import episode_server
from serve_apps.workflows.program import Program
from stores.traces.rows import episode_table, traces_of
from stores.types import Cause, Completion, EpisodeStatus, FinishReason, Task, Trace
from tests.small_tokenizers import QWEN, build

pytestmark = pytest.mark.test

HERE = "tests.serve_apps.program.program_functions"
CALCULATOR = str(Path(calculator.__file__))
ONE = {"calculator": {"max_tokens": 200}}
MULTIPLY = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*8"}}</tool_call>'
ADD = '<tool_call>{"arguments": {"expression":   "7+48"},   "name": "calculate"}</tool_call>'
"""With keys and spaces as the chat template would not write them."""


def play(
    program: Program,
    folder: Path,
    says: Callable[[AgentCall], str],
    *,
    prompt: str = "7+6*8",
    max_model_len: int = 1024,
    timeout_s: float = 30,
    end: bool = True,
    pause: Callable[[AgentCall], Awaitable[None]] | None = None,
) -> Trace:
    tokenizer = ChatTokenizer(folder)

    async def complete(call: AgentCall) -> Completion:
        if pause is not None:
            await pause(call)
        ids = tokenizer.encode_completion(says(call))[: None if end else -1]
        ids = ids[: call.request.sampling.max_tokens]
        is_cut = ids[-1] != tokenizer.eos_id
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            policy_version=3,
        )

    task = Task(task_id="t1", prompt=prompt, answers=("55",), source="s", metadata={"level": 2})
    limits = EpisodeConfig(turn_timeout_s=timeout_s, episode_timeout_s=timeout_s, max_attempts=2)
    context = {"tokenizer": tokenizer, "max_model_len": max_model_len, "max_tokens": 200}
    trace = asyncio.run(start(program, complete, task=task, limits=limits, **context))
    (stored,) = traces_of(episode_table([trace]).to_batches()[0])
    assert stored.outcome_metadata == trace.outcome_metadata and len(stored.turns) == len(trace.turns)
    return trace


def by_turn(*texts: str) -> Callable[[AgentCall], str]:
    """Says these, one after the other."""
    left = list(texts)
    return lambda call: left.pop(0)


def code(body: str) -> list[str]:
    """A program of a few lines, with a client and what it is asked."""
    head = "import sys, json, os\nfrom openai import OpenAI\nclient = OpenAI()\n"
    return [sys.executable, "-c", head + body, "{prompt}"]


def say(*messages: dict[str, Any] | str, **more: Any) -> str:
    whole = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    settings = ", ".join(f"{k}={v!r}" for k, v in more.items())
    return f"client.chat.completions.create(model='m', messages={whole!r}, {settings}).choices[0].message"


@pytest.mark.parametrize(
    "how",
    [
        {"function": "pipelines.examples.calculator.program:answer"},
        {"command": [sys.executable, CALCULATOR, "{prompt}"]},
    ],
)
def test_an_unchanged_program_is_an_episode_whose_turns_continue_token_by_token(
    tiny_model: Path, how: dict[str, Any]
) -> None:
    trace = play(Program(ONE, **how), tiny_model, by_turn(MULTIPLY, ADD, "55"))
    assert (trace.status, trace.answer, trace.error) == (EpisodeStatus.OK, "55", "")
    assert [t.completion_text for t in trace.turns] == [MULTIPLY, ADD, "55"]
    assert trace.outcome_metadata["conversations"] == {"calculator": {"new": 1, "grown": 2}}
    for before, after in zip(trace.turns, trace.turns[1:], strict=False):
        whole = [*before.prompt_token_ids, *before.completion_token_ids]
        assert list(after.prompt_token_ids[: len(whole)]) == whole, "what training merges into one row"
    assert [(c.tool, c.caller, c.request, c.response) for c in trace.tool_calls] == [
        ("calculate", "calculator", {"expression": "6*8"}, "48"),
        ("calculate", "calculator", {"expression": "7+48"}, "55"),
    ]
    assert [t.turn_index for t in trace.turns] == [0, 2, 4]
    assert [t.parents for t in trace.turns] == [(), (0, 1), (2, 3)] and trace.tool_calls[1].parents == (2,)
    assert all(t.policy_version == 3 and t.is_format_ok for t in trace.turns)


@pytest.mark.nightly
def test_a_prompt_is_the_templates_own_text(tiny_model: Path) -> None:
    """Continued or not, the model reads what the chat template would have written of its own words."""
    trace = play(Program(ONE, command=[sys.executable, CALCULATOR, "{prompt}"]), tiny_model, by_turn(MULTIPLY, "48"))
    tokenizer = ChatTokenizer(tiny_model)
    last = trace.turns[-1]
    rendered = tokenizer.render_chat(
        [
            {"role": "user", "content": "7+6*8"},
            {"role": "assistant", "content": MULTIPLY},
            {"role": "tool", "content": "48"},
        ],
        tools=calculator.TOOLS,
    )
    assert last.prompt_text == rendered
    assert "".join(tokenizer.token_text(t) for t in last.prompt_token_ids) == rendered


def test_a_conversation_told_in_other_words_is_counted_and_a_fresh_question_is_a_new_one(tiny_model: Path) -> None:
    other = {"role": "assistant", "content": "in other words"}
    body = f"{say('one')}\n{say('one', other, 'two')}\n{say('another')}\nprint(1)"
    trace = play(Program(ONE, command=code(body)), tiny_model, by_turn("first words", "second words", "b"))
    assert trace.outcome_metadata["conversations"] == {"calculator": {"new": 2, "broken": 1}}
    assert per_agent([trace], [])["calculator"]["broken_share"] == 1.0


@pytest.mark.parametrize(
    "how",
    [
        {"function": "pipelines.examples.calculator.program:answer"},
        {"function": "program_functions:ask"},
        {"command": code(f"print({say('x')}.content)")},
        {
            "command": code(f"print({say('x')}.content)"),
            "environment": {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "a"},
        },
    ],
)
def test_a_program_reaches_its_model_where_everything_goes_through_a_proxy(
    how: dict[str, Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert play(Program(ONE, **how), tiny_model, by_turn("55")).answer == "55"


HANDOFF = """
tools = [{'type': 'function', 'function': {'name': 'transfer_to_calculator'}}]
chat = [{'role': 'user', 'content': 'x'}]
call = client.chat.completions.create(model='triage', messages=chat, tools=tools).choices[0].message
chat += [call.model_dump(), {'role': 'tool', 'tool_call_id': call.tool_calls[0].id, 'content': 'transferred'}]
print(client.chat.completions.create(model='calculator', messages=chat).choices[0].message.content)
"""


def test_the_call_of_a_handoff_is_that_of_the_agent_which_handed_over(tiny_model: Path) -> None:
    says = by_turn('<tool_call>{"name": "transfer_to_calculator", "arguments": {}}</tool_call>', "55")
    trace = play(Program({"triage": {}, "calculator": {}}, command=code(HANDOFF)), tiny_model, says)
    assert [turn.agent for turn in trace.turns] == ["triage", "calculator"]
    (call,) = trace.tool_calls
    assert (call.tool, call.caller, call.parents) == ("transfer_to_calculator", "triage", (0,))
    assert trace.turns[1].parents == (1,), "who reads the answer builds on it"


@pytest.mark.nightly
def test_one_call_twice_in_two_spellings_leaves_the_conversation_whole(tiny_model: Path) -> None:
    spelled = '<tool_call>{"arguments": {"expression": "6*8"},   "name": "calculate"}</tool_call>'
    command = [sys.executable, CALCULATOR, "{prompt}"]
    trace = play(Program(ONE, command=command), tiny_model, by_turn(MULTIPLY, spelled, "48"))
    assert trace.outcome_metadata["conversations"] == {"calculator": {"new": 1, "grown": 2}}
    assert [turn.completion_text for turn in trace.turns] == [MULTIPLY, spelled, "48"]
    assert MULTIPLY in trace.turns[2].prompt_text and spelled in trace.turns[2].prompt_text


@pytest.mark.parametrize("sends_thoughts", [False, True])
def test_thoughts_of_a_turn_stand_beside_its_content_and_the_conversation_stays_whole(
    tmp_path: Path, sends_thoughts: bool
) -> None:
    folder = build("qwen", tmp_path / "qwen")
    (folder / "chat_template.jinja").write_text(QWEN + "{# <think></think> #}")
    body = (
        "chat = [{'role': 'user', 'content': 'x'}]\n"
        "first = client.chat.completions.create(model='m', messages=chat).choices[0].message.model_dump()\n"
        f"back = first if {sends_thoughts} else {{'role': 'assistant', 'content': first['content']}}\n"
        "chat += [back, {'role': 'user', 'content': 'y'}]\n"
        "last = client.chat.completions.create(model='m', messages=chat).choices[0].message\n"
        "print(first['reasoning'], first['content'], last.content)"
    )
    says = by_turn("<think>hm</think>6", "7")
    trace = play(Program(ONE, command=code(body)), folder, says, max_model_len=512)
    assert trace.answer == "hm 6 7", "an answer without thoughts is all content"
    assert trace.outcome_metadata["conversations"] == {"calculator": {"new": 1, "grown": 1}}
    assert [turn.completion_text for turn in trace.turns] == ["<think>hm</think>6", "7"]


def test_a_choice_of_no_tool_keeps_the_tools_in_the_prompt_and_reads_no_call(tiny_model: Path) -> None:
    body = (
        "tools = [{'type': 'function', 'function': {'name': 'calculate'}}]\n"
        "chat = [{'role': 'user', 'content': 'x'}]\n"
        "first = client.chat.completions.create(model='m', messages=chat, tools=tools).choices[0].message\n"
        "chat += [first.model_dump(), {'role': 'user', 'content': 'y'}]\n"
        "last = client.chat.completions.create(model='m', messages=chat, tools=tools, tool_choice='none')\n"
        "print(last.choices[0].message.content, last.choices[0].message.tool_calls)"
    )
    trace = play(Program(ONE, command=code(body)), tiny_model, by_turn("hm", MULTIPLY))
    assert trace.outcome_metadata["conversations"] == {"calculator": {"new": 1, "grown": 1}}
    assert trace.answer == f"{MULTIPLY} None"


@pytest.mark.nightly
def test_a_call_that_was_given_up_and_repeated_leaves_no_hole(tiny_model: Path) -> None:
    """A client whose patience ends closes its connection and asks again: that is one turn, at the first place."""
    body = (
        "impatient = OpenAI(timeout=0.7, max_retries=1)\n"
        "tools = [{'type': 'function', 'function': {'name': 'calculate'}}]\n"
        "chat = [{'role': 'user', 'content': 'x'}]\n"
        "call = impatient.chat.completions.create(model='m', messages=chat, tools=tools).choices[0].message\n"
        "chat += [call.model_dump(), {'role': 'tool', 'tool_call_id': call.tool_calls[0].id, 'content': '48'}]\n"
        "print(impatient.chat.completions.create(model='m', messages=chat, tools=tools).choices[0].message.content)"
    )
    pauses = [3.0, 0.0, 3.0, 0.0]
    seeds: list[int] = []

    async def pause(call: AgentCall) -> None:
        seeds.append(call.request.seed)
        await asyncio.sleep(pauses.pop(0))

    says = by_turn(MULTIPLY, "48")
    trace = play(Program(ONE, command=code(body)), tiny_model, says, pause=pause)
    assert [(t.turn_index, t.round_index, t.parents) for t in trace.turns] == [(0, 0, ()), (2, 1, (0, 1))]
    assert [(c.call_index, c.response) for c in trace.tool_calls] == [(1, "48")]
    assert trace.outcome_metadata["conversations"] == {"calculator": {"new": 1, "grown": 1}}
    assert seeds[0] == seeds[1] and seeds[2] == seeds[3] and seeds[0] != seeds[2]


def test_a_program_gets_path_home_and_what_the_configuration_names(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "TROUPE_TEST_NAMED"):
        monkeypatch.setenv(name, "secret")
    command = code(f"{say('x')}\nprint(sorted(os.environ))")
    program = Program(ONE, command=command, inherit=["TROUPE_TEST_NAMED"], environment={"EXTRA": "1"})
    trace = play(program, tiny_model, by_turn("hm"))
    ours = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "TROUPE_EPISODE_URL", "TROUPE_CALCULATOR_URL"}
    by_python = {"LC_CTYPE"}
    assert {*json.loads(trace.answer.replace("'", '"'))} - by_python == ours | {
        "PATH",
        "HOME",
        "EXTRA",
        "TROUPE_TEST_NAMED",
    }


def test_several_agents_by_model_name_or_by_base_url(tiny_model: Path) -> None:
    body = (
        "def ask(client, model):\n"
        "    return client.chat.completions.create(model=model, messages=[{'role': 'user', 'content': 'x'}])"
        ".choices[0].message.content\n"
        "other = OpenAI(base_url=os.environ['TROUPE_CRITIC_URL'])\n"
        "print(ask(client, 'writer'), ask(other, 'gpt-4o'), [m.id for m in client.models.list()])\n"
        "try:\n    ask(client, 'gpt-4o')\nexcept Exception as e:\n    print(e.status_code, e.code, e.message)"
    )
    program = Program({"writer": {}, "critic": {}}, command=code(body))
    trace = play(program, tiny_model, lambda call: call.agent)
    assert [t.agent for t in trace.turns] == ["writer", "critic"]
    first, second = trace.answer.splitlines()
    assert first == "writer critic ['writer', 'critic']"
    assert "404 agent_not_found" in second and "agents are writer, critic" in second


@pytest.mark.nightly
def test_streams_stops_and_limits_are_the_callers_and_the_sampling_is_the_runs(tiny_model: Path) -> None:
    body = (
        "parts = client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'x'}], stream=True, "
        "stop=['END'], temperature=0.1, max_tokens=9, stream_options={'include_usage': True})\n"
        "parts = list(parts)\n"
        "text = ''.join(p.choices[0].delta.content or '' for p in parts if p.choices)\n"
        "print(json.dumps([text, parts[-2].choices[0].finish_reason, parts[-1].usage.completion_tokens]))"
    )
    trace = play(Program(ONE, command=code(body)), tiny_model, by_turn("12END and more"))
    text, reason, num = json.loads(trace.answer)
    (turn,) = trace.turns
    assert (text, reason, num) == ("12", "stop", len(turn.completion_token_ids))
    assert turn.completion_text.startswith("12") and turn.completion_text.rstrip().endswith("END"), "what was read"
    assert len(turn.rollout_logprobs) == num
    assert (turn.sampling.temperature, turn.sampling.max_tokens) == (1.0, 9)


def test_what_an_episode_cannot_do_is_refused_by_name(tiny_model: Path) -> None:
    body = (
        "for more in ({'n': 2}, {'logprobs': True, 'top_logprobs': 3}, {'logit_bias': {'7': 5}}):\n"
        "    try:\n"
        f"        {say('x').replace(', )', ', **more)')}\n"
        "    except Exception as e:\n        print(e.status_code, e.param)\n"
    )
    trace = play(Program(ONE, command=code(f"{body}\n{say('x')}")), tiny_model, by_turn("hm"))
    refused = ("n", "top_logprobs", "logit_bias")
    assert trace.answer.splitlines() == [f"400 {name}" for name in refused]
    assert len(trace.turns) == 1


def test_what_an_answer_must_match_is_stored_with_its_turn(tiny_model: Path) -> None:
    schema = {"type": "object", "properties": {"value": {"type": "boolean"}}}
    forms = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "v", "schema": schema}}},
        {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        {},
    ]
    body = "\n".join(say("x", **form) for form in forms)
    says = by_turn('{"value": true}', "yes", MULTIPLY, "free")
    trace = play(
        Program(ONE, command=code(body)), tiny_model, says, timeout_s=240
    )  # the first form waits for vLLM's imports
    typed, chosen, forced, free = (turn.sampling.constraint for turn in trace.turns)
    tokenizer = ChatTokenizer(tiny_model)
    tokens = {"end_ids": sorted(tokenizer.end_ids), "never": sorted(tokenizer.turn_ids)}
    assert json.loads(typed) == {"json": schema} | tokens
    assert '"no"' in json.loads(chosen)["structural_tag"] and "<tool_call>" in json.loads(forced)["structural_tag"]
    assert free == "" and all(turn.sampling.is_unfiltered for turn in trace.turns)


def test_a_form_that_is_not_tried_is_no_failure_of_the_program(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, busy = {"constraint": '{"json": {}, "end_ids": []}'}, {"error": "busy", "code": OVERLOADED, "param": None}
    monkeypatch.setattr(constraints, "_started", lambda: None)
    monkeypatch.setattr(constraints, "_answer", lambda _, line: made if "a0" in line else busy)
    monkeypatch.setattr(constraints, "MAX_WAITING", 0)  # whoever else asks
    body = "\n".join(say("x", extra_body={"structured_outputs": {"choice": [f"a{i}"]}}) for i in range(2))
    trace = play(Program(ONE, command=code(body)), tiny_model, by_turn("a0", "a1"))
    assert (trace.status, trace.cause, len(trace.turns)) == (EpisodeStatus.INFRA_ERROR, Cause.INFRASTRUCTURE, 1)
    assert "busy" in trace.error


def test_a_form_that_the_engine_refuses_is_the_programs_error(tiny_model: Path) -> None:
    def refuse(call: AgentCall) -> str:
        if call.request.sampling.constraint:
            raise RequestRefused("no grammar")
        return "free"

    body = (
        f"try:\n    {say('x', response_format={'type': 'json_object'})}\n"
        f"except Exception as e:\n    print(e.status_code, e.body['message'])\n{say('x')}"
    )
    trace = play(Program(ONE, command=code(body)), tiny_model, refuse, timeout_s=240)
    assert trace.answer == "400 the engine refuses this form: no grammar"
    assert (trace.status, len(trace.turns)) == (EpisodeStatus.OK, 1)


def test_a_posted_outcome_is_the_answer_and_its_score_is_paid(tiny_model: Path) -> None:
    body = (
        f"{say('x')}\n"
        "import httpx\n"
        "url, key = os.environ['TROUPE_EPISODE_URL'] + '/outcome', {'Authorization': 'Bearer ' + client.api_key}\n"
        "posted = {'answer': '55', 'score': 0.25, 'metadata': {'kind': 'late'}}\n"
        "print(httpx.post(url, json=posted, headers=key).status_code, httpx.post(url, json=posted).status_code, "
        "httpx.post(url, json={'score': 7}, headers=key).json()['error']['param'])"
    )
    program = Program(ONE, command=code(body))
    trace = play(program, tiny_model, by_turn("hm"))
    assert trace.answer == "55" and trace.outcome_metadata["kind"] == "late"
    credit = PostedScore().assign_credit(trace)
    assert credit.outcome == 0.25 and [r.reward for r in credit.rewards] == [0.25]
    with pytest.raises(ValueError, match="ended without a score: have the program post it"):
        PostedScore().assign_credit(play(Program(ONE, command=code(say("x"))), tiny_model, by_turn("1")))


@pytest.mark.nightly
def test_the_task_reaches_the_program_without_its_answers(tiny_model: Path) -> None:
    command = [*code(f"{say('x')}\nprint(sys.argv[1], sys.argv[2], sys.stdin.read())")[:-1], "{task}", "{x} {prompt}"]
    trace = play(Program(ONE, command=command, stdin=True), tiny_model, by_turn("hm"), prompt="why {task}?")
    assert trace.answer == (
        '{"task_id": "t1", "prompt": "why {task}?", "source": "s", "metadata": {"level": 2}} {x} why {task}? why {task}?'
    )


@pytest.mark.parametrize(("failure", "status"), [("error", "agent_error"), ("no_answer", "ok")])
def test_a_program_that_fails_is_an_error_or_an_episode_without_answer(
    tiny_model: Path, failure: Any, status: str
) -> None:
    body = f"{say('x')}\nprint('half')\nraise SystemExit('no such key')"
    trace = play(Program(ONE, command=code(body), failure=failure), tiny_model, by_turn("hm"))
    assert (trace.status, trace.answer, len(trace.turns)) == (status, "", 1)
    assert (trace.error, trace.is_outcome) == ("ProgramError: exit code 1; no such key", True)
    assert trace.cause == ("policy" if failure == "error" else ""), "what it read may have made it fail"


@pytest.mark.parametrize("failure", ["error", pytest.param("no_answer", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([sys.executable, "-c", "import nonexistent_module"], r"made no model call .*exit code 1; .*No module named"),
        (["echo", "55"], r"made no model call .*exit code 0; nothing on standard error"),
        (
            code("import sys\nprint('careful', file=sys.stderr)\nprint(55)"),
            r"made no model call .*exit code 0; careful",
        ),
        (
            code(f"try:\n    {say('x', n=2)}\nexcept Exception as e:\n    print(e)"),
            r"no call of the program was answered, 1 were refused, the last with: an episode has one choice .*exit code 0",
        ),
        (
            code(say("x", n=2)),
            r"1 were refused, the last with: an episode has one choice .*exit code 1; .*BadRequestError",
        ),
    ],
)
def test_a_program_without_an_answered_call_is_an_error_of_the_set_up_and_says_why(
    tiny_model: Path, command: list[str], said: str, failure: Any
) -> None:
    trace = play(Program(ONE, command=command, failure=failure), tiny_model, by_turn())
    assert (trace.status, trace.cause, trace.turns) == (EpisodeStatus.AGENT_ERROR, "author", ())
    assert re.search(said, trace.error, re.DOTALL), trace.error


@pytest.mark.nightly
def test_a_program_that_fails_after_a_prompt_that_did_not_fit_keeps_its_error(tiny_model: Path) -> None:
    body = f"{say('x')}\n{say('word ' * 200)}"
    trace = play(Program(ONE, command=code(body)), tiny_model, by_turn("hm"), max_model_len=64)
    assert (trace.status, trace.stop_reason, trace.cause) == (EpisodeStatus.TRUNCATED, "context_exhausted", "")
    assert "the context holds 64" in trace.error and "; then ProgramError: exit code 1" in trace.error


@pytest.mark.parametrize("in_metadata", [False, True])
@pytest.mark.parametrize("score", [float("nan"), -3, 7])
def test_a_functions_score_is_checked_as_a_posted_one_is_and_only_its_episode_is_an_error(
    tiny_model: Path, score: float, in_metadata: bool
) -> None:
    async def answer(prompt: str, client: Any) -> dict[str, Any]:
        messages: Any = [{"role": "user", "content": prompt}]
        await client.chat.completions.create(model="m", messages=messages)
        said = {"score": score if prompt == "bad" else 0.5}
        return {"answer": "55", **({"metadata": said} if in_metadata else said)}

    program = Program(ONE, function="pipelines.examples.calculator.program:answer")
    program._function = answer
    bad, good = (play(program, tiny_model, by_turn("hm"), prompt=prompt) for prompt in ("bad", "good"))
    assert (bad.status, bad.cause, bad.is_outcome) == (EpisodeStatus.AGENT_ERROR, "author", False)
    assert f"the episode's score is {score}: a score is a number of 0 to 1" in bad.error
    assert PostedScore().assign_credit(good).outcome == 0.5


@pytest.mark.parametrize(
    ("returned", "answer", "error"),
    [
        ({"answer": "55", "metadata": None}, "55", ""),
        ({"score": 0.5, "answer": None}, "", ""),
        ({"final_answer": "55"}, "", "a mapping with the keys final_answer: an answer has the key 'answer'"),
        ({"answer": "55", "metadata": [1]}, "", "metadata = '[1]': metadata is a mapping"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_function_returns_in_another_form_is_named_and_null_is_nothing(
    tiny_model: Path, returned: dict[str, Any], answer: str, error: str, is_async: bool
) -> None:
    async def asked(prompt: str, client: Any) -> dict[str, Any]:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt}])
        return returned

    program = Program(ONE, function="program_functions:says_json")
    if is_async:
        program._function = asked
    trace = play(program, tiny_model, lambda call: json.dumps(returned))
    assert trace.answer == answer and error in trace.error and bool(trace.error) == bool(error)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_leaves_the_interpreter_ends_its_episode_only(tiny_model: Path, is_async: bool) -> None:
    async def leave(prompt: str, client: Any) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        await client.chat.completions.create(model="m", messages=messages)
        return sys.exit("cannot read this")

    program = Program(ONE, function="program_functions:leave")
    if is_async:
        program._function = leave
    trace = play(program, tiny_model, by_turn("hm"))
    assert (trace.status, trace.cause) == (EpisodeStatus.AGENT_ERROR, "policy")
    assert trace.error == "ProgramError: the function called sys.exit('cannot read this')"


def test_a_program_that_cannot_start_says_which(tiny_model: Path) -> None:
    program = Program(ONE, command=["no-such-program"])
    trace = play(program, tiny_model, by_turn())
    assert trace.status == EpisodeStatus.AGENT_ERROR and "'no-such-program' did not start: No such file" in trace.error
    with pytest.raises(ValueError, match="'no-such-program' is no file here and not on this machine's PATH"):
        program.preflight()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command": ["agent.py"]}, "'agent.py' is a file that does not start by itself: make it executable"),
        ({"command": ["./agent.py"]}, "'./agent.py' is a file that does not start by itself: make it executable"),
        ({"command": ["echo"], "folder": "agents"}, "workflow.settings.folder: 'agents' is no folder"),
    ],
)
def test_a_program_that_no_episode_could_start_is_refused_before(
    settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match=re.escape(said)):
        Program(ONE, **settings).preflight()


def test_a_program_may_lie_on_a_path_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "my-agent").write_text("#!/bin/sh\n")
    (tmp_path / "my-agent").chmod(0o755)
    assert Program(ONE, command=["my-agent"], environment={"PATH": str(tmp_path)}).preflight() == ["program: my-agent"]
    assert Program(ONE, command=["./my-agent"], folder=str(tmp_path)).preflight()


def test_a_program_says_which_files_a_gateway_would_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").touch()
    (said,) = Program(ONE, command=[sys.executable, "my_agent.py", "{prompt}"]).preflight()
    assert said.endswith("{prompt} (found from this folder: my_agent.py; to serve the team, give absolute paths)")
    (said,) = Program(ONE, command=[sys.executable, str(tmp_path / "my_agent.py")]).preflight()
    assert said.endswith("my_agent.py")


@pytest.mark.timeout(60)
def test_engines_that_fail_are_no_fault_of_the_program(tiny_model: Path) -> None:
    """The program waits and would try again: it is ended, and the whole episode is repeated."""
    calls = []

    def says(call: AgentCall) -> str:
        calls.append(call)
        raise PolicyCallError("no replica")

    trace = play(Program(ONE, command=code(f"{say('x')}\nprint(1)")), tiny_model, says)
    assert (trace.status, trace.attempt) == (EpisodeStatus.INFRA_ERROR, 2)
    assert "no replica" in trace.error


def test_a_fault_of_ours_is_no_answer_of_the_program(tiny_model: Path) -> None:
    """Also where the program's own failures count as empty answers."""

    def says(call: AgentCall) -> str:
        raise AttributeError("a bug")

    program = Program(ONE, function="pipelines.examples.calculator.program:answer", failure="no_answer")
    trace = play(program, tiny_model, says)
    assert (trace.status, trace.error) == (EpisodeStatus.AGENT_ERROR, "AttributeError: a bug")


def test_a_program_that_never_ends_is_ended_with_what_it_started(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    child = (
        f"import subprocess, time\np = subprocess.Popen(['sleep', '600'])\nopen({str(file)!r}, 'w').write(str(p.pid))\n"
    )
    trace = play(
        Program(ONE, command=[sys.executable, "-c", child + "time.sleep(600)"]), tiny_model, by_turn(), timeout_s=3
    )
    assert trace.status == EpisodeStatus.TIMEOUT
    deadline = time.monotonic() + 5
    while _is_alive(int(file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(int(file.read_text()))


def test_a_program_that_ends_takes_along_what_it_left_running(tiny_model: Path) -> None:
    body = f"{say('x')}\nimport subprocess\nsubprocess.Popen(['sleep', '600'])\nprint(42)"
    trace = play(Program(ONE, command=code(body)), tiny_model, by_turn("a"), timeout_s=25)
    assert (trace.status, trace.answer) == (EpisodeStatus.OK, "42")
    assert trace.duration_s < 20


@pytest.mark.parametrize(
    ("function", "played_again"),
    [
        ("asks_again_after_a_tool", "asks_again_after_a_tool"),
        ("conversations_at_once", "conversations_in_another_order"),
    ],
)
def test_an_episode_that_is_played_again_has_the_same_prompts(function: str, played_again: str, tmp_path: Path) -> None:
    """Mistral's template shows the ids of calls."""
    folder = build("mistral", tmp_path / "m")

    def says(call: AgentCall) -> str:
        is_first = '"role": "tool"' not in call.inputs["messages"]
        return '[TOOL_CALLS][{"name": "calculate", "arguments": {"expression": "6*8"}}]' if is_first else "48"

    first, again = (play(Program(ONE, function=f"{HERE}:{name}"), folder, says) for name in (function, played_again))
    assert (first.status, first.error) == (EpisodeStatus.OK, "")
    prompts = [sorted(tuple(turn.prompt_token_ids) for turn in trace.turns) for trace in (first, again)]
    assert prompts[0] == prompts[1] and len(first.tool_calls) > 0


def test_a_turn_has_read_the_tools_of_its_own_conversation_only(tiny_model: Path) -> None:
    def says(call: AgentCall) -> str:
        return "fine" if '"role": "tool"' in call.inputs["messages"] else MULTIPLY

    async def slow(call: AgentCall) -> None:
        await asyncio.sleep(0.3 if '"role": "tool"' in call.inputs["messages"] else 0.05)

    trace = play(Program(ONE, function=f"{HERE}:conversations_at_once"), tiny_model, says, pause=slow)
    read = [turn.parents for turn in trace.turns if "tool" in turn.prompt_text and "48 in" in turn.prompt_text]
    tools = {call.call_index for call in trace.tool_calls}
    assert len(tools) == 3 == len(read)
    assert sorted(index for parents in read for index in parents if index in tools) == sorted(tools)


def test_the_client_of_a_function_waits_as_long_as_the_run_does(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai._base_client, "DEFAULT_TIMEOUT", openai.Timeout(0.5))

    async def slow(call: AgentCall) -> None:
        await asyncio.sleep(1.5)

    function = "pipelines.examples.calculator.program:answer"
    trace = play(Program(ONE, function=function), tiny_model, by_turn("55"), pause=slow)
    assert (trace.status, trace.error) == (EpisodeStatus.OK, "")


def test_a_program_whose_output_another_process_holds_open_does_not_hold_its_episode(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A program that leaves a server behind, in a session of its own: its answer counts when it has ended."""
    file = tmp_path / "pid"
    away = "import subprocess\np = subprocess.Popen(['sleep', '600'], start_new_session=True)"
    body = f"{say('x')}\n{away}\nopen({str(file)!r}, 'w').write(str(p.pid))\nprint(42)"
    trace = play(Program(ONE, command=code(body)), tiny_model, by_turn("a"), timeout_s=60)
    psutil.Process(int(file.read_text())).kill()
    assert (trace.status, trace.answer, trace.error) == (EpisodeStatus.OK, "42", "")


def test_of_megabytes_that_a_program_writes_the_end_counts(tiny_model: Path) -> None:
    body = f"{say('x')}\nprint('x' * 2_000_000)\nprint(42)"
    trace = play(Program(ONE, command=code(body), answer="last_line"), tiny_model, by_turn("a"))
    assert (trace.status, trace.answer) == (EpisodeStatus.OK, "42")
    body = f"{say('x')}\nsys.stderr.write('log\\n' * 500_000)\nraise ValueError('the cause')"
    trace = play(Program(ONE, command=code(body)), tiny_model, by_turn("a"))
    assert trace.error.endswith("ValueError: the cause")


def _is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_prompt_that_does_not_fit_is_an_error_and_the_episode_is_truncated(tiny_model: Path) -> None:
    body = f"try:\n    {say('word ' * 200)}\nexcept Exception as e:\n    print(e.code)\n"
    trace = play(Program(ONE, command=code(body)), tiny_model, by_turn(), max_model_len=64)
    assert (trace.status, trace.answer) == (EpisodeStatus.TRUNCATED, "context_length_exceeded")
    trace = play(Program(ONE, command=code(say("word " * 200))), tiny_model, by_turn(), max_model_len=64)
    assert (trace.status, trace.stop_reason) == (EpisodeStatus.TRUNCATED, "context_exhausted")


def test_a_tool_call_that_cannot_be_read_is_a_broken_format(tiny_model: Path) -> None:
    trace = play(
        Program(ONE, function="pipelines.examples.calculator.program:answer"),
        tiny_model,
        by_turn('<tool_call>{"name": '),
    )
    assert [t.format_fault for t in trace.turns] == ["a tool call that cannot be read"]
    assert trace.answer == '<tool_call>{"name": '


def test_a_container_is_started_with_the_episodes_variables(tiny_model: Path, tmp_path: Path) -> None:
    """The engine is a stand-in that prints what it was started with; the key stands among its variables alone. The network of this
    machine, which is asked for by name, has no forwarder."""
    engine = tmp_path / "docker"
    ask = (
        "import json, os, sys, httpx\nprint(*sys.argv[1:], sep='\\n')\nenv = os.environ\n"
        "print(json.dumps({name: env.get(name) for name in sys.argv}))\n"
        "httpx.post(env['OPENAI_BASE_URL'] + '/chat/completions', headers={'Authorization': 'Bearer ' + env['OPENAI_API_KEY']},"
        " json={'model': 'm', 'messages': [{'role': 'user', 'content': 'x'}]})\n"
    )
    engine.write_text(f"#!{sys.executable}\nimport sys\nif sys.argv[1] == 'rm': sys.exit()\n{ask}")
    engine.chmod(0o755)
    container = {"image": "me/agent:1", "arguments": ["--ask", "{prompt}"], "engine": str(engine), "network": "host"}
    *lines, values = play(Program(ONE, container=container), tiny_model, by_turn("hm")).answer.splitlines()
    assert (
        lines[:3] == ["run", "--rm", "--name"]
        and lines[4:6] == ["--network", "host"]
        and lines[-3:] == ["me/agent:1", "--ask", "7+6*8"]
    )
    variables = {name: json.loads(values)[name] for i, name in enumerate(lines) if lines[i - 1] == "--env"}
    assert variables["OPENAI_BASE_URL"] + "/agents/calculator" == variables["TROUPE_CALCULATOR_URL"]
    assert variables["OPENAI_API_KEY"] and not any(variables["OPENAI_API_KEY"] in line for line in lines)


def test_another_program_is_another_team(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    prints = []
    for text in ("print(1)", "print(2)"):
        file.write_text(text)
        prints.append(Program(ONE, command=[sys.executable, str(file)]).prompts_sha256)
    assert prints[0] != prints[1]


def test_another_function_is_another_team_also_behind_a_decorator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tracing_of_others.py").write_text(
        "import functools\ndef traced(f):\n    @functools.wraps(f)\n    def call(*a): return f(*a)\n    return call\n"
    )
    prints = []
    for text in ("1", "2"):
        head = "from tracing_of_others import traced\n@traced\n"
        (tmp_path / "decorated_agent.py").write_text(f"{head}def answer(prompt, client): return {text}\n")
        prints.append(Program(ONE, function="decorated_agent:answer").prompts_sha256)
    assert prints[0] != prints[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs one of command, function and container, got none"),
        ({"command": ["x"], "function": "a:b"}, "got command and function"),
        (
            {"command": ["x"], "answer": "first"},
            "workflow.settings.answer: Input should be 'output' or 'last_line' .got 'first'.",
        ),
        ({"function": "pipelines.examples.calculator.program:none"}, "workflow.settings.function: .* has no 'none'"),
    ],
)
def test_settings_that_make_no_program_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_workflow("serve_apps.workflows.program:Program", {"agents": ONE, **settings})


def test_a_key_or_an_episode_that_is_none_is_refused(tiny_model: Path) -> None:
    seen: list[tuple[int, str]] = []

    async def ask(prompt: str, client: Any) -> str:
        async with httpx.AsyncClient() as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            url = str(client.base_url).rstrip("/")
            for where, key in ((url, "wrong"), (url.rpartition("/")[0] + "/other", client.api_key)):
                answer = await http.post(
                    f"{where}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
                )
                seen.append((answer.status_code, answer.json()["error"]["code"]))
        return ""

    program = Program(ONE, function="pipelines.examples.calculator.program:answer")
    program._function = ask
    play(program, tiny_model, by_turn())
    assert seen == [(401, "invalid_api_key"), (404, "episode_not_found")]


@pytest.mark.anyio
async def test_the_server_never_closes_a_connection_before_its_client_does() -> None:
    """Clients keep one for 5 s, counted from when they have read an answer, which is later than the server counts."""
    server = await episode_server("127.0.0.1")
    reader, writer = await asyncio.open_connection(*server._socket.getsockname())
    writer.write(b"GET /v1/episodes/none/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"404" in await reader.readline()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(7):
            await reader.read()  # to its end
    writer.close()


def test_demonstrations_of_the_calculator_run_through_the_program_itself(tiny_model: Path) -> None:
    import random

    answers = []
    for seed in range(6):
        rng = random.Random(seed)
        trace = play(
            Program(ONE, function="pipelines.examples.calculator.program:answer", failure="no_answer"),
            tiny_model,
            lambda call, rng=rng: demonstrate(call.agent, call.task, call.inputs, rng),
        )
        assert trace.status in (EpisodeStatus.OK, EpisodeStatus.TRUNCATED) and trace.turns
        answers.append(trace.answer)
    assert "55" in answers and len(set(answers)) > 1


@pytest.mark.parametrize("function", ["pipelines.examples.calculator.program:answer", "program_functions:closes"])
def test_many_programs_play_side_by_side(tiny_model: Path, function: str) -> None:
    """Turns of one never reach another, nor do their spans, and one that closes its client closes no other's."""
    tokenizer = ChatTokenizer(tiny_model)
    program = Program(ONE, function=function)

    complete = saying(lambda call: call.task.task_id, tokenizer)

    async def all_of_them() -> Sequence[Trace]:
        tasks = [Task(task_id=f"task{i}", prompt=f"{i}", answers=()) for i in range(60)]
        return await asyncio.gather(*(start(program, complete, task=t, tokenizer=tokenizer) for t in tasks))

    with exported() as memory:
        traces = asyncio.run(all_of_them())
        spans = spans_of(memory)
    assert [t.answer for t in traces] == [f"task{i}" for i in range(60)]
    episodes = {span.span_id: span.attributes["troupe.episode_id"] for span in spans if not span.parent_id}
    calls = [span for span in spans if span.name == "chat g"]
    assert [episodes[call.parent_id] for call in calls] == [call.attributes["troupe.episode_id"] for call in calls]
    assert set(episodes.values()) == {t.episode_id for t in traces} and len(calls) == sum(len(t.turns) for t in traces)
