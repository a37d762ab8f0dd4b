"""thoughts: the prompt and the completion of a reasoning model -> what it thinks, and what it says.

    begun      the prompt ends with the opening mark     everything up to the closing mark is a thought
    possible   the template knows the marks              a thought where the completion begins with the opening mark
    none       thoughts are turned off, or not known     everything is said

The marks are those of the chat template, or of the vLLM parser that `serve.reasoning_parser` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from serve_apps.authoring import thinking
from serve_apps.chat.text_stream import overlap
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.engines.vllm.parsers import reasoning_marks

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


def thought_marks(tokenizer: ChatTokenizer) -> ThoughtMarks | None:
    """Returns the marks that the chat template knows; None where it knows none."""
    return next((marks for marks in KNOWN_MARKS if marks.end in tokenizer.chat_template), None)


def marks_of_parser(name: str, tokenizer: ChatTokenizer) -> ThoughtMarks:
    """Returns the marks of vLLM's reasoning parser of this name: see `reasoning_marks`."""
    return ThoughtMarks(**reasoning_marks(name, tokenizer.hugging_face)._asdict())


def thoughts_of(prompt: str, marks: ThoughtMarks | None) -> Thoughts:
    """Returns whether a completion of this prompt has thoughts, by the end of the prompt."""
    end = prompt.rstrip()
    if marks is None or end.endswith(marks.end):  # a template writes empty thoughts where they are turned off
        return "none"
    return "begun" if marks.is_assumed or end.endswith(marks.begin) else "possible"


@dataclass(frozen=True, kw_only=True)
class ThoughtReader:
    """Tells the thoughts of the completions of one prompt from what they say."""

    marks: ThoughtMarks | None
    thoughts: Thoughts

    @classmethod
    def of(cls, prompt: str, marks: ThoughtMarks | None) -> ThoughtReader:
        """Returns the reader of the completions of a prompt."""
        return cls(marks=marks, thoughts=thoughts_of(prompt, marks))

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
