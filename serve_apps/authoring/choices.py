"""choices: an agent that picks one of several named options -> a label of one token, sampled from the exact distribution over them.

    A solver: works it out           the prompt's {options}, those that are offered now
    C stop: the answer is final
              -> "C"                 the completion

The engine samples from the softmax over the labels that are offered, and the set is stored with the turn, so that the trainer computes the
same distribution. An option keeps its label whatever else is offered.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serve_apps.authoring.contracts import Parsed

if TYPE_CHECKING:
    from serve_apps.chat.tokenizer import ChatTokenizer

LABELS = string.ascii_uppercase[:20]
"""What options are called, in the order of their declaration: as many as vLLM gives logprobs of one position."""
OFFERED = "options"
"""The input of the prompt that lists what is offered."""


@dataclass(frozen=True)
class Choice:
    """Requires one of the options that are offered; nothing else can be sampled.

    The agent's prompt has `{options}`. A call passes `options=` with the names that are offered, or leaves it out to offer all of them:
    `reply = await agents.router(question=..., options=["solver", "stop"])`, then `reply["choice"]` is a name. For an option of `messages` the
    agent is asked a second time, for a text, which is `reply["message"]`; the field is empty for other options.
    """

    options: Mapping[str, str]
    """What the prompt says of each option, by its name; may be empty."""
    messages: tuple[str, ...] = ()
    """The options that carry a message."""
    ask: str = "Write the message for {choice}."
    """What the agent is told when it has chosen one of them."""

    def __init__(
        self, options: Mapping[str, str] | Sequence[str], *, messages: Iterable[str] = (), ask: str = ask
    ) -> None:
        """Raises ValueError for fewer than two options or more than there are labels, for one that comes twice, for messages of no option, and
        for an `ask` that is no template of `choice` alone."""
        if isinstance(options, str) or isinstance(messages, str):
            raise ValueError("Choice: options and messages are lists of names, not one text")
        named = dict(options) if isinstance(options, Mapping) else dict.fromkeys(options, "")
        if len(named) < len(options):
            raise ValueError(f"Choice: an option comes twice in {list(options)}: give each its own name")
        carrying = tuple(messages)
        if not 2 <= len(named) <= len(LABELS):
            raise ValueError(f"Choice: {len(named)} options: declare 2 to {len(LABELS)} with different names")
        if unknown := [name for name in carrying if name not in named]:
            raise ValueError(f"Choice: messages = {unknown}, which are no options: {', '.join(named)}")
        try:
            ask.format(choice="")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"Choice: ask = {ask!r} is no template of {{choice}} ({error!r}): write a brace twice"
            ) from None
        object.__setattr__(self, "options", named)
        object.__setattr__(self, "messages", carrying)
        object.__setattr__(self, "ask", ask)

    @property
    def field_names(self) -> tuple[str, ...]:
        """Returns `choice` and `message`, the fields that every reply has."""
        return ("choice", "message")

    @property
    def label_of(self) -> dict[str, str]:
        """The label of each option."""
        return dict(zip(self.options, LABELS, strict=False))

    def question(self, name: str) -> list[dict[str, Any]]:
        """Returns what follows in the conversation when this option is chosen, so that the agent writes its message."""
        return [
            {"role": "assistant", "content": self.label_of[name]},
            {"role": "user", "content": self.ask.format(choice=name)},
        ]

    @property
    def longest_question(self) -> list[dict[str, Any]]:
        """The longest `question` of an option that carries a message: the prompt must leave room for it."""
        return self.question(max(self.messages, key=len))

    def parse(self, text: str) -> Parsed:
        """Reads a label; a text that is none, as a silenced agent's, is a fault, and the choice empty."""
        names = {label: name for name, label in self.label_of.items()}
        name = names.get(text.strip(), "")
        return Parsed(
            fields={"choice": name, "message": ""}, fault="" if name else f"no option is called {text[:40]!r}"
        )

    def offered(self, inputs: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Returns the names that a call offers, in the order of declaration, and its inputs with the text that lists them.

        Raises ValueError where it offers none, or what is no option.
        """
        offered = inputs.get(OFFERED, list(self.options))
        if not isinstance(offered, str | Iterable):
            raise ValueError(f"options = {offered!r}: pass the names that are offered, of {', '.join(self.options)}")
        names = [offered] if isinstance(offered, str) else list(offered)
        if unknown := [name for name in names if name not in self.options]:
            raise ValueError(f"options = {unknown}: this agent's Choice has {', '.join(self.options)}")
        if not names:
            raise ValueError(f"options = []: offer one option at least, of {', '.join(self.options)}")
        labels = self.label_of
        offered = [name for name in self.options if name in names]
        lines = [
            f"{labels[name]} {name}" + (f": {self.options[name]}" if self.options[name] else "") for name in offered
        ]
        return offered, {**inputs, OFFERED: "\n".join(lines)}

    def tokens(self, names: Iterable[str], tokenizer: ChatTokenizer) -> dict[str, int]:
        """Returns the label's token of each of these options. Raises ValueError where a label is not one token of the model."""
        labels, tokens = self.label_of, {}
        for name in names:
            ids = tokenizer.encode(labels[name])
            if len(ids) != 1 or tokenizer.decode(ids).strip() != labels[name]:
                what = f"{len(ids)} tokens" if len(ids) != 1 else f"a token of {tokenizer.decode(ids)!r}"
                raise ValueError(
                    f"option {name!r} is called {labels[name]!r}, which is {what} for the model in {tokenizer.folder}: a choice is one "
                    "token; use a model whose tokenizer has a token for each capital letter"
                )
            tokens[name] = ids[0]
        return tokens
