"""constraints: what a request says its answer must look like -> the text of `Sampling.constraint`.

The text is JSON: an argument of vLLM's `StructuredOutputsParams`; `end_ids`, the tokens that may follow when the form is complete;
and `never`, control tokens that it does not spell: to a grammar they are the text of their names, which any string may hold. The trainer makes the masks of such a turn again from it (`train_loops/rows/masks.py`).

tool_choice required, named      a call in the model's own format, by vLLM's structural tag of that format
response_format, structured_outputs                                                  vLLM's own argument
response_format beside tools     the form or a call
a model that thinks              its thoughts, free, and then one of the above

    event loop ──> a thread that waits ──> form process: vLLM's parsers make the form ──> a fork of it compiles the form, and is killed
                                           after TRIAL_CPU_S of processor or TRIAL_BYTES of memory

An engine compiles a form in the process that answers everybody, and has no limit of time for most of them: a schema of four lines can take
years. Whoever sends one gets status 400, and no engine sees it. What a form turned out to be is remembered.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from hashlib import sha256
from typing import Any

from serve_apps.authoring.parsers import Parsers
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.engines.vllm.parsers import call_format, load_parsers
from serve_apps.openai_api.answer_reader import AnswerReader, ThoughtReader, Thoughts
from serve_apps.openai_api.chat_request import ChatRequest, NamedTool
from serve_apps.openai_api.protocol import ApiError
from serve_apps.openai_api.sampling_fields import SamplingFields
from serve_apps.openai_api.tool_formats import OfferedTools

Format = dict[str, Any]
"""A format of xgrammar's structural tags."""


MAX_CHARACTERS = 200_000
"""Characters of a form with all tools that may be called."""
MAX_WAITING = 32
"""Forms that wait to be tried; a known one does not wait."""
MAX_REMEMBERED = 256
OVERLOADED = "overloaded"
"""The code of a form that was not tried, which says nothing of the form."""
ANSWER_S = 120.0
"""Seconds in which the form process must answer: the first form waits for it to start, and imports take seconds."""
FORM_FIELDS = {"tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs"}
"""The fields of a request that say what its answer must look like."""


def is_constrained(request: ChatRequest) -> bool:
    """Whether a request says what its answer must look like."""
    return request.must_call or bool(request.own_form)


async def prepared_constraint(request: ChatRequest, reader: AnswerReader, *, is_patient: bool = False) -> str:
    """Returns `Sampling.constraint` of a chat, made and tried in the form process; ApiError as `constraint_of`, and for a form that takes too much.

    Also imports vLLM's parsers where calls have to be read by them.

    Args:
        is_patient: waits however many forms are tried before this one.
    """
    tools, tokenizer = reader.tools, reader.tools.tokenizer
    if tools.needs_vllm:
        await asyncio.to_thread(load_parsers)
    if not is_constrained(request):
        return ""
    if not tokenizer.folder:  # a scripted model: there is no engine that a form could stop
        return constraint_text(constraint_of(request, tools, reader.thoughts), tokenizer)
    return await tried_constraint(
        request, tokenizer, parsers=reader.parsers, thoughts=reader.thoughts.thoughts, is_patient=is_patient
    )


async def tried_constraint(
    request: SamplingFields,
    tokenizer: ChatTokenizer,
    *,
    parsers: Parsers | None = None,
    thoughts: Thoughts = "none",
    is_patient: bool = False,
) -> str:
    """Returns the constraint of a request that has one, made and tried in the form process; ApiError.

    Args:
        parsers: what reads the completions; None where they are bare.
    """
    form = {
        "tokenizer": tokenizer.folder_for_others(),
        "parsers": asdict(parsers or Parsers()),
        "thoughts": thoughts,
        "request": request.model_dump(include=FORM_FIELDS, exclude_defaults=True, by_alias=True),
    }
    return await form_process().constraint(form, is_patient=is_patient)


def constraint_text(arguments: Mapping[str, Any], tokenizer: ChatTokenizer) -> str:
    """Returns `Sampling.constraint`; empty where there are no arguments.

    What vLLM would turn into another form first is written in that form: choices as a structural tag, `json_object` as a schema.
    """
    if not arguments:
        return ""
    form = dict(arguments)
    if "choice" in form:
        form = _structural_tag(_as_format(form))
    elif "json_object" in form:
        form = {"json": {"type": "object"}}
    text = json.dumps(form, ensure_ascii=False)
    never = [token for token in sorted(tokenizer.turn_ids) if tokenizer.token_text(token) not in text]
    return json.dumps(form | {"end_ids": sorted(tokenizer.end_ids), "never": never}, ensure_ascii=False)


def constraint_of(request: ChatRequest, tools: OfferedTools, thoughts: ThoughtReader) -> dict[str, Any]:
    """Returns the argument of `StructuredOutputsParams`; empty where the answer may be any text.

    Imports vLLM where the answer may be a call; ApiError 400 where nothing can constrain the model's format of calls.
    """
    if not is_constrained(request):
        return {}
    if request.must_call:
        return _tagged(_call_format(request, tools), thoughts)
    own = request.own_form
    if thoughts.thoughts == "none" and not tools.tools:
        return own
    form = _as_format(own)
    if tools.tools:
        form = {"type": "or", "elements": [form, _call_format(request, tools)]}
    return _tagged(form, thoughts)


def _as_format(arguments: Mapping[str, Any]) -> Format:
    """Returns a format that matches the same; ApiError 400 where formats have no such thing."""
    ((kind, value),) = arguments.items()
    match kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json":
            schema = value if isinstance(value, dict) else _loaded(value, "structured_outputs.json")
            return {"type": "json_schema", "json_schema": schema}
        case "regex":
            return {"type": "regex", "pattern": value}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}
        case _:
            return {"type": "grammar", "grammar": value}


def _loaded(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, f"{field} is not the JSON of an object", code="invalid_value", param=field)
    return value


def _call_format(request: ChatRequest, tools: OfferedTools) -> Format:
    """Returns the format of the calls that a request allows, in the model's own words."""
    choice = request.tool_choice
    tool_choice = choice.model_dump() if isinstance(choice, NamedTool) else "required"
    form = call_format(tools.format.name, tools.tools, tool_choice, are_parallel=request.parallel_tool_calls)
    if form is None:
        raise ApiError(
            400,
            f"a call cannot be forced of model {request.model!r}: vLLM has no grammar of the format {tools.format.name!r}",
            code="unsupported_value",
            param="tool_choice",
        )
    return form


def _tagged(form: Format, thoughts: ThoughtReader) -> dict[str, Any]:
    """Returns the argument for a format that follows on thoughts."""
    before: list[Format] = []
    after_thoughts = {"type": "regex", "pattern": r"\n{0,2}"}
    marks = thoughts.marks
    if marks is not None and thoughts.thoughts == "begun":
        before = [_thought("", marks.end), after_thoughts]
    elif marks is not None and thoughts.thoughts == "possible":
        thought = {"type": "sequence", "elements": [_thought(marks.begin, marks.end), after_thoughts]}
        before = [{"type": "optional", "content": thought}]
    whole = {"type": "sequence", "elements": [*before, form]} if before else form
    return _structural_tag(whole)


def _structural_tag(form: Format) -> dict[str, Any]:
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def _thought(begin: str, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}


class FormProcess:
    """The form process of this process, and what it said. It starts with the first form; `ask` may be called from any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[str, asyncio.Task[Mapping[str, Any]]] = OrderedDict()
        """By hash: what was said of a form, or the work on it, for which all who ask for it wait."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms")
        self._num_waiting = 0
        atexit.register(self.close)

    async def constraint(self, asked: Mapping[str, Any], *, is_patient: bool = False) -> str:
        """Returns the constraint that is asked for, see `form_process.constraint_for`; ApiError 400 where an engine should not see it, 429
        or 503, of code `OVERLOADED`, where it was not tried."""
        line = json.dumps(asked)
        if len(line) > MAX_CHARACTERS:
            raise _refusal(
                f"the form and its tools have {len(line)} characters, and at most {MAX_CHARACTERS} are accepted"
            )
        key = sha256(line.encode()).hexdigest()
        if key not in self._known:
            trial = self._known[key] = asyncio.ensure_future(self._asked_in_turn(line, is_patient=is_patient))
            trial.add_done_callback(partial(self._forget_unless_answered, key))
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        answer = await asyncio.shield(self._known[key])  # one who leaves ends the trial for nobody
        if "error" in answer:
            raise ApiError(400, answer["error"], code=answer["code"], param=answer["param"])
        return str(answer["constraint"])

    def _forget_unless_answered(self, key: str, trial: asyncio.Task[Mapping[str, Any]]) -> None:
        if (trial.cancelled() or trial.exception() is not None) and self._known.get(key) is trial:
            del self._known[key]

    async def _asked_in_turn(self, line: str, *, is_patient: bool) -> Mapping[str, Any]:
        if self._num_waiting >= MAX_WAITING and not is_patient:
            raise ApiError(429, "too many forms are being tried: try again later", code=OVERLOADED, retry_after_s=2)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.ask, line)
        finally:
            self._num_waiting -= 1

    def ask(self, line: str) -> Mapping[str, Any]:
        """Returns what the process says of a form; ApiError 400 where it says nothing, and then it is killed, 503 where it had no time."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _started()
            answered = _answer(self._process, line)
            if answered is None:
                self.close()
                raise _refusal(f"the form could not be made within {ANSWER_S:g} s")
        if answered.get("code") == OVERLOADED:  # raised, so that it is not remembered
            raise ApiError(503, answered["error"], code=OVERLOADED, retry_after_s=2)
        return answered

    def close(self) -> None:
        """Ends the process; the next form starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@cache
def form_process() -> FormProcess:
    """Returns the one that all requests of this process share."""
    return FormProcess()


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value")


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "serve_apps.openai_api.form_process"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _answer(process: subprocess.Popen[bytes], line: str) -> Mapping[str, Any] | None:
    """Returns the next line of a process; None where none comes in time, or it has ended."""
    assert process.stdin is not None and process.stdout is not None, "`_started` opens both"
    try:
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(ANSWER_S):
            return None
    got = process.stdout.readline()
    answer: Mapping[str, Any] | None = json.loads(got) if got else None
    return answer
