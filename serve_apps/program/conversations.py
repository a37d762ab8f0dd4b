"""conversations: the messages that a program sends -> prompt ids that continue the earlier calls token by token.

    call 1   messages A            -> ids of A      the completion is B
    call 2   messages A, B, C      -> ids of A + the sampled ids of B + ids of C

If every call were tokenized anew, a prompt need not begin with the tokens that were sampled: the text of a tool call is
rendered again from its parsed form, and a text has many tokenizations. So the sampled ids of a completion are reused in
later prompts, wherever the rendered text allows that. Turns that continue each other exactly become one training row;
turns that do not are counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serve_apps.chat.tokenizer import READY, ChatTokenizer, PromptSettings

CONVERSATIONS = "conversations"
"""The key of every agent's `Conversations.counts` in the metadata of an episode's outcome."""
Growth = Literal["new", "grown", "broken"]
"""How a call grows: it begins a conversation, continues one token by token, or continues one in other words or tokens."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    messages: Messages
    marked: str
    """Prompt and completion as marked text, in which control tokens differ from text like them."""
    token_ids: tuple[int, ...]
    turn_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A completion, and by what it is told from others that were returned as the same message."""

    completion: str
    before: int
    """Identifies the messages that it answers."""
    call_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationPrompt:
    """Holds a prompt and the turn that it continues."""

    text: str
    """What is read of it."""
    marked: str
    """The same as marked text (see `ChatTokenizer.mark_chat`)."""
    token_ids: tuple[int, ...]
    growth: Growth
    continues: int | None
    """The index of the turn whose prompt and completion it begins with; None where there is none."""


class Conversations:
    """Remembers the calls of one agent in one episode."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._calls: list[_Call] = []
        self._said: dict[Any, list[_Said]] = {}
        """A message that was returned to the program -> the completions that it was made from, one for each time."""
        self.counts: Counter[str] = Counter()

    def prompt(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]], settings: PromptSettings = READY
    ) -> ConversationPrompt:
        """Returns the prompt for messages as OpenAI's clients send them.

        Raises jinja2's TemplateError where the template refuses them.
        """
        is_continued = any(_key(message) in self._said for message in messages)
        is_continued |= any(len(c.messages) < len(messages) and _begins(messages, c.messages) for c in self._calls)
        marked = self._tokenizer.mark_chat(self._for_template(messages), tools=tools, settings=settings)
        text = self._tokenizer.plain(marked)
        begun = max((c for c in self._calls if marked.startswith(c.marked)), key=lambda c: len(c.marked), default=None)
        if begun is None:
            growth: Growth = "broken" if is_continued else "new"
            ids = tuple(self._tokenizer.encode_marked(marked))
            return ConversationPrompt(text=text, marked=marked, token_ids=ids, growth=growth, continues=None)
        ids = (*begun.token_ids, *self._tokenizer.encode_marked(marked[len(begun.marked) :]))
        return ConversationPrompt(text=text, marked=marked, token_ids=ids, growth="grown", continues=begun.turn_index)

    def add(
        self,
        messages: Messages,
        prompt: ConversationPrompt,
        completion_ids: Sequence[int],
        *,
        answered: Mapping[str, Any],
        turn_index: int,
    ) -> None:
        """Remembers the completion of a prompt, and the message that was returned to the program for it."""
        self.counts[prompt.growth] += 1
        has_end = bool(completion_ids) and completion_ids[-1] in self._tokenizer.end_ids
        completion = self._tokenizer.mark_completion(completion_ids)
        said = _Said(completion=completion, before=_histories(messages)[-1], call_ids=_call_ids(answered))
        self._said.setdefault(_key(answered), []).append(said)
        end = self._tokenizer.token_text(completion_ids[-1]) if has_end else ""
        self._calls.append(
            _Call(
                messages=list(messages),
                marked=prompt.marked + completion + end,
                token_ids=(*prompt.token_ids, *completion_ids),
                turn_index=turn_index,
            )
        )

    def _for_template(self, messages: Messages) -> list[dict[str, Any]]:
        """Returns messages as the chat template reads them; a completion is put back as it was sampled.

        Of several completions that read the same, it is the one with these ids of calls, or else after these messages.
        """
        shown: list[dict[str, Any]] = []
        for message, before in zip(messages, _histories(messages), strict=False):
            ids = _call_ids(message)
            said = max(
                reversed(self._said.get(_key(message), ())),
                key=lambda said: (said.call_ids == ids, said.before == before),
                default=None,
            )
            shown.append(dict(message) if said is None else {"role": "assistant", "content": said.completion})
        return shown


def _histories(messages: Messages) -> list[int]:
    """Returns what identifies the messages before each message, and at the end all of them."""
    histories = [0]
    for message in messages:
        histories.append(hash((histories[-1], _key(message))))
    return histories


def _call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(call["id"] for call in message.get("tool_calls") or ())


def _key(message: Mapping[str, Any]) -> Any:
    """Returns the parts of a message by which it is recognised when a program sends it back."""
    calls = message.get("tool_calls") or ()
    return (
        message["role"],
        message.get("content") or "",
        tuple((c["function"]["name"], _text(c["function"]["arguments"])) for c in calls),
    )


def _text(arguments: Any) -> str:
    """Returns arguments as canonical JSON: they are JSON text in a message, and data for a template."""
    data = arguments
    if isinstance(arguments, str):
        try:
            data = json.loads(arguments)
        except (ValueError, RecursionError):  # no JSON, or an integer of more digits than Python reads
            return arguments
    return json.dumps(data, sort_keys=True)


def _begins(messages: Messages, earlier: Messages) -> bool:
    return [_key(m) for m in messages[: len(earlier)]] == [_key(m) for m in earlier]
