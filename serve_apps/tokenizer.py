"""tokenizer: chat messages -> token ids and back, for one model folder. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template."""

    def __init__(self, folder: str | Path) -> None:
        """ValueError where the folder has no tokenizer or no chat template."""
        from transformers import PreTrainedTokenizerFast

        if not (Path(folder) / "tokenizer.json").is_file():
            raise ValueError(f"model folder {folder} has no tokenizer.json: save the tokenizer beside the weights")
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        if not self._tokenizer.chat_template:
            raise ValueError(f"model folder {folder} has no chat template: add chat_template.jinja")
        self._special = set(self._tokenizer.all_special_ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Prompt ids, ready for the assistant's turn."""
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return self.encode(str(text))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special token added."""
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def encode_completion(self, text: str) -> list[int]:
        """Ids of a whole completion, ended by the end-of-sequence token."""
        return [*self.encode(text), self.eos_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        kept = [t for t in token_ids if t not in self._special]
        return self._tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=False)

    @property
    def eos_id(self) -> int:
        """Id that ends a completion."""
        return int(self._tokenizer.eos_token_id)


@lru_cache(maxsize=16)
def load_tokenizer(folder: str) -> ChatTokenizer:
    """The tokenizer of a folder, loaded once per process."""
    return ChatTokenizer(folder)
