"""constraints: what a request says its answer must look like -> the text of `Sampling.constraint`.

The text is JSON: an argument of vLLM's `StructuredOutputsParams`, and `end_ids`, the tokens that may follow when the form is
complete. The trainer makes the masks of such a turn again from it (`train_loops/rows/masks.py`).

tool_choice required, named      a call in the model's own format, by vLLM's structural tag of that format
response_format, structured_outputs                                                  vLLM's own argument
response_format beside tools     the form or a call
a model that thinks              its thoughts, free, and then one of the above
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from serve_apps.authoring.parsers import Parsers
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.openai_api.answer_reader import AnswerReader
from serve_apps.openai_api.chat_request import ChatRequest, NamedTool
from serve_apps.openai_api.forms import form_process
from serve_apps.openai_api.protocol import ApiError
from serve_apps.openai_api.sampling_fields import SamplingFields
from serve_apps.openai_api.thoughts import ThoughtReader, Thoughts
from serve_apps.openai_api.tool_formats import OfferedTools, load_parsers

Format = dict[str, Any]
"""A format of xgrammar's structural tags."""


FORM_FIELDS = {"tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs"}
"""The fields of a request that say what its answer must look like."""


def is_constrained(request: ChatRequest) -> bool:
    """Whether a request says what its answer must look like."""
    return request.must_call or bool(request.own_form)


async def prepared_constraint(request: ChatRequest, reader: AnswerReader) -> str:
    """Returns `Sampling.constraint` of a chat, made and tried as `forms` says; ApiError as `constraint_of`, and for a form that takes too much.

    Also imports vLLM's parsers where calls have to be read by them.
    """
    tools, tokenizer = reader.tools, reader.tools.tokenizer
    if tools.needs_vllm:
        await asyncio.to_thread(load_parsers)
    if not is_constrained(request):
        return ""
    if not tokenizer.folder:  # a scripted model: there is no engine that a form could stop
        return constraint_text(constraint_of(request, tools, reader.thoughts), tokenizer.end_ids)
    return await tried_constraint(request, tokenizer, parsers=reader.parsers, thoughts=reader.thoughts.thoughts)


async def tried_constraint(
    request: SamplingFields, tokenizer: ChatTokenizer, *, parsers: Parsers | None = None, thoughts: Thoughts = "none"
) -> str:
    """Returns the constraint of a request that has one, made and tried in the form process; ApiError.

    Args:
        parsers: what reads the completions; None where they are bare.
    """
    form = {
        "tokenizer": tokenizer.folder,
        "parsers": asdict(parsers or Parsers()),
        "thoughts": thoughts,
        "request": request.model_dump(include=FORM_FIELDS, exclude_defaults=True, by_alias=True),
    }
    return await form_process().constraint(form)


def constraint_text(arguments: Mapping[str, Any], end_ids: Collection[int]) -> str:
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
    return json.dumps(form | {"end_ids": sorted(end_ids)}, ensure_ascii=False)


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
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager
    from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag, limit_to_single_tool_call
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    model = ToolParserManager.get_tool_parser(tools.format.name).structural_tag_model
    if model is None:
        raise ApiError(
            400,
            f"a call cannot be forced of model {request.model!r}: vLLM has no grammar of the format {tools.format.name!r}",
            code="unsupported_value",
            param="tool_choice",
        )
    choice = request.tool_choice
    tool_choice = choice.model_dump() if isinstance(choice, NamedTool) else "required"
    asked = ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}], tools=[dict(tool) for tool in tools.tools], tool_choice=tool_choice
    )
    tag = get_model_structural_tag(
        model, asked.tools, asked.tool_choice, reasoning=False, strict_level=ToolStrictLevel.PARAMETER
    )
    assert tag is not None, "there are tools, and a call is required"
    if not request.parallel_tool_calls:
        limit_to_single_tool_call(tag)
    form: Format = tag.model_dump(mode="json")["format"]
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
