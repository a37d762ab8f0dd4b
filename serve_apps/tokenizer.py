"""tokenizer: chat messages -> token ids and back, for one model folder. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any


class ChatTokenizer:
    """Wraps a Hugging Face tokenizer that has a chat template."""

    def __init__(self, folder: str | Path) -> None:
        """Loads the tokenizer of a model folder; ValueError where it has no tokenizer or no chat template."""
        from transformers import PreTrainedTokenizerFast

        if not (Path(folder) / "tokenizer.json").is_file():
            raise ValueError(f"model folder {folder} has no tokenizer.json: save the tokenizer beside the weights")
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        if not self._tokenizer.chat_template:
            raise ValueError(f"model folder {folder} has no chat template: add chat_template.jinja")
        self._special = set(self._tokenizer.all_special_ids)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Returns prompt ids, ready for the assistant's turn.

        Raises jinja2's TemplateError where the template refuses the messages.
        """
        return self.encode(self.render_chat(messages, tools=tools))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Returns the text that `encode_chat` tokenizes."""
        text = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False
        )
        return str(text)

    @property
    def knows_tools(self) -> bool:
        """True where the chat template shows tools to the model."""
        return "tools" in str(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text, without special tokens."""
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def encode_completion(self, text: str) -> list[int]:
        """Returns the ids of a whole completion, ended by the end-of-sequence token."""
        return [*self.encode(text), self.eos_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens left out."""
        shown = [t for t in token_ids if t not in self._special]
        return self._tokenizer.backend_tokenizer.decode(shown, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token, special ones included.

        Bytes that are no character become the replacement character.
        """
        return self._tokenizer.backend_tokenizer.decode([token_id], skip_special_tokens=False)

    def decode_stream(self) -> TokenStream:
        """Returns a decoder for tokens that come one after the other."""
        return TokenStream(self)

    @property
    def eos_id(self) -> int:
        """The id of the token that ends a completion."""
        return int(self._tokenizer.eos_token_id)


class TokenStream:
    """Decodes a growing completion, and holds back a character until all of its bytes have come."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done = 0
        """Tokens whose text was returned.
        A few before them are decoded again: the text of a token may depend on its neighbours."""
        self._start = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens add, as far as its characters are complete."""
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(before) :]

    def end(self) -> str:
        """Returns the text that was held back, a broken character included."""
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]


@lru_cache(maxsize=16)
def load_tokenizer(folder: str) -> ChatTokenizer:
    """Returns the tokenizer of a folder, loaded once per process."""
    return ChatTokenizer(folder)
