"""parsers: what vLLM knows of model families: how they write calls of tools and thoughts. Needs no engine.

The import takes seconds once per process; `load_parsers` makes it in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Tools = Sequence[Mapping[str, Any]]
"""In OpenAI's form."""
PARSER_FAULTS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)
"""What vLLM's parsers raise of a model that they do not fit, and of texts that they cannot read."""


def load_parsers() -> None:
    """Imports vLLM's parsers of calls."""
    import vllm.entrypoints.openai.chat_completion.protocol
    import vllm.tool_parsers
    import vllm.tool_parsers.structural_tag_registry  # noqa: F401

    for name in (
        "vllm.tool_parsers",
        "vllm.parser",
    ):  # what is no call stays text: no reason for a traceback in the log
        logging.getLogger(name).setLevel(logging.CRITICAL)


def check_tool_parser(name: str, tokenizer: Any) -> None:
    """Raises ValueError where vLLM has no tool parser of this name, and where it cannot read what the model writes."""
    from vllm.tool_parsers import ToolParserManager

    names = ToolParserManager.list_registered()
    if name not in names:
        raise ValueError(f"serve.tool_parser = {name!r}: vLLM has no such parser; it has {', '.join(sorted(names))}")
    try:  # some miss their tokens as they are made, others are stubs that only vLLM's own server gets around
        _tool_parser(name)(tokenizer).extract_tool_calls("", _request())
    except PARSER_FAULTS as error:
        raise ValueError(
            f"serve.tool_parser = {name!r} does not fit the model: {error}: take `auto`, or the parser of its family"
        ) from None


def parsed_calls(name: str, tokenizer: Any, tools: Tools, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text outside of calls, and each call's function and arguments as JSON, as vLLM's parser `name` reads them.

    Text that it cannot read stays as it is. Args: tokenizer: of Hugging Face.
    """
    load_parsers()
    request = _request(tools)
    parser = _tool_parser(name)(tokenizer, request.tools)
    try:
        found = parser.extract_tool_calls(text, request)
    except PARSER_FAULTS:  # they catch most of what they raise
        return text, []
    if not found.tools_called:
        return text, []
    return (found.content or "").strip(), [(c.function.name, c.function.arguments) for c in found.tool_calls]


def call_format(name: str, tools: Tools, choice: Any, *, are_parallel: bool) -> dict[str, Any] | None:
    """Returns the format of structural tags that a call matches as the models of parser `name` write it; None where vLLM has none.

    Args: choice: OpenAI's `tool_choice`, `required` or a named function.
    """
    from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag, limit_to_single_tool_call
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    model = _tool_parser(name).structural_tag_model
    if model is None:
        return None
    asked = _request(tools, tool_choice=choice)
    tag = get_model_structural_tag(
        model, asked.tools, asked.tool_choice, reasoning=False, strict_level=ToolStrictLevel.PARAMETER
    )
    assert tag is not None, "there are tools, and a call is required"
    if not are_parallel:
        limit_to_single_tool_call(tag)
    form: dict[str, Any] = tag.model_dump(mode="json")["format"]
    return form


class Marks(NamedTuple):
    """The texts between which a reasoning parser takes thoughts to be."""

    begin: str
    end: str
    is_assumed: bool
    """Whether it takes a text without marks for thoughts."""


def reasoning_marks(name: str, tokenizer: Any) -> Marks:
    """Returns the marks at which vLLM's reasoning parser of this name splits a completion.

    ValueError where vLLM has no such parser, where it does not fit the model, or where it splits at more than two marks.
    """
    from vllm.reasoning import ReasoningParserManager

    names = ReasoningParserManager.list_registered()
    if name not in names:
        raise ValueError(f"serve.reasoning_parser = {name!r}: vLLM has no such parser; it has {', '.join(names)}")
    try:
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
        thoughts, _ = parser.extract_reasoning("a text without marks", _request())
    except PARSER_FAULTS as error:
        raise ValueError(f"serve.reasoning_parser = {name!r} does not fit the model: {error}") from None
    begin, end = parser.reasoning_start_str, parser.reasoning_end_str
    if not begin or not end:
        raise ValueError(
            f"serve.reasoning_parser = {name!r} splits at more than an opening and a closing mark, which is not supported: "
            "take `auto`, or `none` to leave thoughts in the text"
        )
    return Marks(begin, end, is_assumed=thoughts is not None)


def _tool_parser(name: str) -> Any:
    """Returns vLLM's class of this name."""
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager.get_tool_parser(name)


def _request(tools: Tools = (), **settings: Any) -> Any:
    """Returns a chat that offers these tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    settings |= {"tools": [dict(tool) for tool in tools]} if tools else {}
    return ChatCompletionRequest(messages=[{"role": "user", "content": ""}], **settings)
