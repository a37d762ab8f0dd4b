"""answer_reader: a completion -> the assistant's message in OpenAI's form: its thoughts, what it says, what it calls.

tokenizer, names of parsers ──> AnswerFormat     how the completions of a model group are read
a request and its prompt    ──> AnswerReader     how those of this prompt are read

Thoughts of a completion, by the end of its prompt:

    begun      the prompt ends with the opening mark     everything up to the closing mark is a thought
    possible   the template knows the marks              a thought where the completion begins with the opening mark
    none       thoughts are turned off, or not known     everything is said

The marks are those of the chat template, or of the vLLM parser that `serve.reasoning_parser` names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from serve_apps.authoring import thinking
from serve_apps.authoring.parsers import Parsers
from serve_apps.chat.text_stream import overlap
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.engines.vllm.parsers import reasoning_marks
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.tool_formats import OfferedTools, ToolFormat, format_of_parser, tool_format

REASONING_KEYS = ("reasoning", "reasoning_content")
"""The keys of thoughts in a message: vLLM's own one, and the one that most clients read."""
Thoughts = Literal["none", "possible", "begun"]
"""Whether a completion has thoughts: it cannot, it may begin with them, or the prompt has begun them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtMarks:
    """The texts between which a model thinks."""

    begin: str
    end: str
    is_assumed: bool = False
    """Whether a completion begins within thoughts although its prompt does not show it."""


FIRST_TOKENS = 16
"""Tokens in which the opening mark of a completion is looked for where thoughts are counted."""
KNOWN_MARKS = (
    ThoughtMarks(begin=thinking.OPEN, end=thinking.CLOSE),
    ThoughtMarks(begin="[THINK]", end="[/THINK]"),
    ThoughtMarks(begin="<seed:think>", end="</seed:think>"),
    ThoughtMarks(begin="◁think▷", end="◁/think▷"),
)
"""The marks that are looked for in a chat template."""


@dataclass(frozen=True, kw_only=True)
class ThoughtReader:
    """Tells the thoughts of the completions of one prompt from what they say."""

    marks: ThoughtMarks | None
    thoughts: Thoughts

    @classmethod
    def of(cls, prompt: str, marks: ThoughtMarks | None) -> ThoughtReader:
        """Returns the reader of the completions of a prompt, whose end shows whether they have thoughts."""
        end = prompt.rstrip()
        if marks is None or end.endswith(marks.end):  # a template writes empty thoughts where they are turned off
            return cls(marks=marks, thoughts="none")
        has_begun = marks.is_assumed or end.endswith(marks.begin)
        return cls(marks=marks, thoughts="begun" if has_begun else "possible")

    def split(self, text: str, *, is_growing: bool = False) -> tuple[str | None, str]:
        """Returns the thoughts of a completion, None where it has none, and what it says.

        Args:
            is_growing: whether more text may come. What may become a part of a mark is held back then, so that each part of a
                longer text begins with that of a shorter one.
        """
        if self.marks is None or self.thoughts == "none":
            return None, text
        begin, end = self.marks.begin, self.marks.end
        stripped = text.lstrip()
        if stripped.startswith(begin):
            rest = stripped[len(begin) :]
        elif is_growing and begin.startswith(stripped):
            return None, ""
        elif self.thoughts == "possible":
            return None, text
        else:
            rest = text
        thoughts, mark, said = rest.partition(end)
        if is_growing and not mark:
            thoughts = thoughts[: len(thoughts) - overlap(thoughts, end)]
        return thoughts, said

    def num_tokens(self, tokenizer: ChatTokenizer, token_ids: Sequence[int]) -> int | None:
        """Returns how many tokens of a completion are thoughts, their marks included.

        None where the prompt shows no thoughts, or where the closing mark is not one token.
        """
        end_id = tokenizer.token_id(self.marks.end) if self.marks is not None and self.thoughts != "none" else None
        if end_id is None:
            return None
        thoughts, _ = self.split(tokenizer.decode(token_ids[:FIRST_TOKENS]))
        if thoughts is None:
            return 0
        return token_ids.index(end_id) + 1 if end_id in token_ids else len(token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the completions of a model group are read."""

    tools: ToolFormat
    thoughts: ThoughtMarks | None
    """None: the model does not think, or its thoughts are left in the text."""


@lru_cache(maxsize=64)
def answer_format(tokenizer: ChatTokenizer, parsers: Parsers) -> AnswerFormat:
    """Returns the format that the model folder shows, or that the parsers name.

    ValueError where vLLM has no such parser, or where it does not fit the model. Imports vLLM where a parser is named.
    """
    thoughts: ThoughtMarks | None = None
    if parsers.reasoning == "auto":
        thoughts = next((marks for marks in KNOWN_MARKS if marks.end in tokenizer.chat_template), None)
    elif parsers.reasoning != "none":
        thoughts = ThoughtMarks(**reasoning_marks(parsers.reasoning, tokenizer.hugging_face)._asdict())
    tools = tool_format(tokenizer) if parsers.tool == "auto" else format_of_parser(parsers.tool, tokenizer)
    return AnswerFormat(tools=tools, thoughts=thoughts)


@dataclass(frozen=True, kw_only=True)
class AnswerReader:
    """Reads the completions of one prompt."""

    parsers: Parsers
    thoughts: ThoughtReader
    tools: OfferedTools
    are_thoughts_shown: bool = True

    @classmethod
    def of(cls, request: ChatRequest, tokenizer: ChatTokenizer, parsers: Parsers, prompt: str) -> AnswerReader:
        """Returns the reader of the completions that answer a request.

        Args:
            tokenizer, parsers: those of the model group.
            prompt: what the model reads, or the end of it.
        """
        form = answer_format(tokenizer, parsers)
        tools = OfferedTools(
            tokenizer=tokenizer,
            format=form.tools,
            tools=request.callable_tools,
            is_single=not request.parallel_tool_calls,
        )
        thoughts = ThoughtReader.of(prompt, form.thoughts)
        return cls(parsers=parsers, thoughts=thoughts, tools=tools, are_thoughts_shown=request.include_reasoning)

    def message(self, text: str, *, id_prefix: str) -> dict[str, Any]:
        """Returns the message of a whole completion; its content is empty where the thoughts were cut."""
        thoughts, said = self.thoughts.split(text)
        return {**self.tools.message(said, id_prefix=id_prefix), **self.reasoning(thoughts)}

    def reasoning(self, thoughts: str | None) -> dict[str, str]:
        """Returns the keys that show thoughts in a message, or in a part of one."""
        return dict.fromkeys(REASONING_KEYS, thoughts) if thoughts and self.are_thoughts_shown else {}

    def shown(self, text: str) -> tuple[str, str]:
        """Returns thoughts and content of a completion that may still grow, as far as they are certain.

        What may become a call is held back.
        """
        thoughts, said = self.thoughts.split(text, is_growing=True)
        return thoughts or "", said[: self.tools.first_call(said)]

    def logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Mapping[int, float]] = ()
    ) -> dict[str, Any]:
        """Returns the logprobs of tokens in OpenAI's form; -9999 stands for minus infinity, which JSON does not have.

        Args: top: at each position the likeliest tokens, where they were asked for.
        """

        def of(token: int, logprob: float) -> dict[str, Any]:
            text = self.tools.tokenizer.token_text(token)
            return {"token": text, "logprob": max(float(logprob), -9999.0), "bytes": list(text.encode())}

        content = [
            {**of(token, logprob), "top_logprobs": [of(*other) for other in top[i].items()] if top else []}
            for i, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
        ]
        return {"content": content, "refusal": None}

    def usage(self, completions: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Returns what OpenAI's `usage` says about the thoughts in completions, each given as its token ids."""
        counts = [self.thoughts.num_tokens(self.tools.tokenizer, token_ids) for token_ids in completions]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": sum(known)}}
