"""tool_formats: a tokenizer and the tools that are offered -> what a completion calls, in the model family's own format.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>              read here (`tool_calls`)
    qwen3_coder   <tool_call><function=NAME><parameter=P>...</parameter></function></tool_call>   ┐
    llama3_json   {"name": ..., "parameters": {...}}, or the same after <|python_tag|>             ├ read by vLLM's tool parsers
    mistral       [TOOL_CALLS] [{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME{...}       ┘
    any other     what vLLM's parser of this name reads, when the completion has ended

The chat template and the vocabulary say which of the first four it is; `serve.tool_parser` names any. vLLM is imported when a call
in its formats may have to be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_apps.authoring.json_text import json_object
from serve_apps.chat.text_stream import overlap
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.engines.vllm.parsers import check_tool_parser, parsed_calls
from serve_apps.openai_api.tool_calls import OPEN, CalledTool, message_of, parse_tool_calls, said_parts

MAX_CHARACTERS = 65_536
"""Longer completions are no calls: the time of some parsers grows with the square of the length."""
MAX_TAGS = 256
"""Completions with more calls or parameters are no calls, for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How the models of a family write a call."""

    name: str
    """The name of vLLM's parser."""
    begins: tuple[str, ...] = ()
    """Texts of which one stands where a call begins; none: a call may begin anywhere, with anything."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Tags that must be closed: an unfinished call is none."""


HERMES = ToolFormat(name="hermes", begins=(OPEN,))
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    begins=(OPEN, "<function="),
    pairs=(("<function=", "</function>"), ("<parameter=", "</parameter>")),
)
LLAMA3_JSON = ToolFormat(name="llama3_json", begins=("<|python_tag|>", "{"))
MISTRAL = ToolFormat(name="mistral", begins=("[TOOL_CALLS]",))
FORMATS = {known.name: known for known in (HERMES, QWEN3_CODER, LLAMA3_JSON, MISTRAL)}


def tool_format(tokenizer: ChatTokenizer) -> ToolFormat:
    """Returns the format in which a model with this template and vocabulary writes calls; Hermes' where nothing says another."""
    template = tokenizer.chat_template
    if "<function=" in template:
        return QWEN3_CODER
    if OPEN in template:
        return HERMES
    if "[TOOL_CALLS]" in template and tokenizer.token_id("[TOOL_CALLS]") is not None:
        return MISTRAL
    if '"parameters"' in template.replace("\\", "") and tokenizer.token_id("<|python_tag|>") is not None:
        return LLAMA3_JSON
    return HERMES


def format_of_parser(name: str, tokenizer: ChatTokenizer) -> ToolFormat:
    """Returns the format that vLLM's tool parser of this name reads; ValueError where it has none, or it does not fit the model."""
    known = FORMATS.get(name, ToolFormat(name=name))
    if known not in (HERMES, QWEN3_CODER):  # these two need no tokens
        check_tool_parser(name, tokenizer.hugging_face)
    return known


@dataclass(frozen=True, kw_only=True)
class OfferedTools:
    """Reads the calls of the tools that one request offers."""

    tokenizer: ChatTokenizer
    format: ToolFormat
    tools: Sequence[Mapping[str, Any]] = ()
    """In OpenAI's form; empty: nothing is a call."""
    is_single: bool = False
    """Whether an answer has at most one call; further ones are left out."""

    @property
    def names(self) -> set[str]:
        """The names of the functions."""
        return {tool["function"]["name"] for tool in self.tools}

    @property
    def needs_vllm(self) -> bool:
        """Whether vLLM is imported to read a call, which takes seconds: do it in a thread, by `load_parsers`."""
        return bool(self.tools) and self.format is not HERMES

    def message(self, text: str, *, id_prefix: str) -> dict[str, Any]:
        """Returns a completion as an assistant's message in OpenAI's form; what is not a call of an offered tool stays text."""
        content, calls = self._read(text) if self.tools else (text, [])
        return message_of(text, content, calls[:1] if self.is_single else calls, id_prefix=id_prefix)

    def first_call(self, text: str) -> int:
        """Returns the length of the text before a call, or before what may become the beginning of one."""
        if not self.tools:
            return len(text)
        if not self.format.begins:
            return 0
        starts = [start for mark in self.format.begins if (start := text.find(mark)) >= 0]
        starts += [len(text) - held for mark in self.format.begins if (held := overlap(text, mark))]
        return min(starts, default=len(text))

    def is_unreadable(self, content: str | None) -> bool:
        """Whether content that was left as text holds what looks like a call, outside of thoughts."""
        text, marks = content or "", self.format.begins[:1]
        return bool(self.tools) and any(text.find(m, begin, end) >= 0 for m in marks for begin, end in said_parts(text))

    def _read(self, text: str) -> tuple[str, list[CalledTool]]:
        if self.format is HERMES:
            return parse_tool_calls(text, self.names)
        if len(text) > MAX_CHARACTERS:
            return text, []
        parts = self._parts_with_calls(text)
        searched = "".join(text[begin:end] for begin, end in parts)
        tags = [(searched.count(opening), searched.count(closing)) for opening, closing in self.format.pairs]
        if len(parts) > MAX_TAGS or any(begun != ended or begun > MAX_TAGS for begun, ended in tags):
            return text, []
        content, done = "", 0
        calls: list[CalledTool] = []
        for begin, end in parts:
            tokenizer = self.tokenizer.hugging_face
            outside, calls_in_part = parsed_calls(self.format.name, tokenizer, self.tools, text[begin:end])
            content += text[done:begin] + outside
            done = end
            calls += [CalledTool(name=name, arguments=arguments) for name, arguments in calls_in_part]
        is_known = all(call.name in self.names and json_object(call.arguments) is not None for call in calls)
        return ((content + text[done:]).strip(), calls) if calls and is_known else (text, [])

    def _parts_with_calls(self, text: str) -> list[tuple[int, int]]:
        """Returns begin and end of what a model says outside of its thoughts, where a call may begin in it."""
        if not self.format.begins:
            return said_parts(text)
        is_call = text.lstrip().startswith(self.format.begins)  # tags of thoughts are within its data
        parts = [(0, len(text))] if is_call else said_parts(text)
        return [(begin, end) for begin, end in parts if any(text.find(m, begin, end) >= 0 for m in self.format.begins)]
