"""control_tokens: what a chat template writes around content -> token ids in which no content makes a control token.

    content ──hide──> content with masks ──template──> marked text ──encode──> ids      plain: marked text ──> what is read
                      (<|im_end|> -> mask)             (<|im_end|> is the template's)

A control token begins or ends a turn, a document or a tool's part of the prompt. Its text in what somebody says is masked before
the template sees it, so that every occurrence left in the rendered text is the template's own. The rendered text is encoded
in one piece, by a twin of the tokenizer that knows control tokens under secret names only: all else is encoded as ever,
and the masked text as the letters that it is.
"""

from __future__ import annotations

import os.path
import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer


class MarkedText(str):
    """Marked text that is content again: `hide` leaves it as it is, control tokens that were sampled included."""


class ControlTokens:
    """Keeps the control tokens of one tokenizer apart from text that looks like them."""

    def __init__(self, backend: Tokenizer, ids: Collection[int], *, unknown: int | None = None) -> None:
        """Builds the twin. Args: ids: of control tokens, all of them added tokens. unknown: what any text may become."""
        added = backend.get_added_tokens_decoder()
        self._ids = {token.content: number for number, token in added.items() if number in ids}
        self._numbers = frozenset(self._ids.values())
        self._refused = self._numbers - {unknown}
        self._nonce = secrets.token_hex(8)
        self._prefixes = {text[:length] for text in self._ids for length in range(1, len(text))}
        self._longest = max(map(len, self._ids), default=0)
        control = any_of(self._ids) if self._ids else "(?!)"
        mask = f"x{self._nonce}h(?P<mask>(?:[0-9a-f]{{2}})+)x"
        self._control = re.compile(control)
        self._mask = re.compile(mask)
        self._marked = re.compile(f"{mask}|(?P<control>{control})")
        self._twin = Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._twin.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._twin.pre_tokenizer = backend.pre_tokenizer
        names = {number: self._name_of(token.content) for number, token in added.items()}
        self._twin.add_tokens([_renamed(added[number], names[number]) for number in sorted(added)])
        self._real = {self._twin.token_to_id(name): number for number, name in names.items()}

    def hide(self, value: Any) -> Any:
        """Returns content, or messages and tools with all that is in them, with the text of control tokens masked.

        Where a text ends with the beginning of such a token, that is masked, too: the next text could complete it.
        """
        if isinstance(value, MarkedText):
            return value
        if isinstance(value, str):
            text = self._control.sub(lambda match: self._masked(match[0]), value)
            for length in range(min(len(text), self._longest - 1), 0, -1):
                if text[-length:] in self._prefixes:
                    return text[:-length] + self._masked(text[-length:])
            return text
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def plain(self, marked: str) -> str:
        """Returns marked text as it is read: content as it was written."""
        return self._mask.sub(lambda match: _unmasked(match["mask"]), marked)

    def encode(self, marked: str) -> list[int]:
        """Returns the ids of marked text: control tokens where it has their text, and none for what is masked."""
        text = self._marked.sub(
            lambda match: self._name_of(match["control"]) if match["control"] else _unmasked(match["mask"]), marked
        )
        encoded = self._twin.encode(text, add_special_tokens=False).ids
        if self._refused.isdisjoint(encoded):
            return [self._real.get(token, token) for token in encoded]
        ids: list[int] = []
        for token in encoded:
            real = self._real.get(token)
            if real is not None:
                ids.append(real)
            elif token in self._refused:  # a vocabulary that holds the text of a control token as a word
                letters = self._twin.id_to_token(token) or ""
                ids += [i for letter in letters for i in self._twin.encode(letter, add_special_tokens=False).ids]
            else:
                ids.append(token)
        return ids

    def has(self, token_id: int) -> bool:
        """Returns whether an id is that of a control token."""
        return token_id in self._numbers

    def begins(self, text: str) -> int | None:
        """Returns the id of the control token that a text begins with; None where it begins with none."""
        match = self._control.match(text)
        return None if match is None else self._ids[match[0]]

    def found(self, text: str) -> set[int]:
        """Returns the ids of the control tokens that stand in a text."""
        return {self._ids[word] for word in self._control.findall(text)}

    def _name_of(self, text: str) -> str:
        return f"x{self._nonce}t{self._ids[text]}x" if text in self._ids else text

    def _masked(self, text: str) -> str:
        return f"x{self._nonce}h{text.encode().hex()}x"


def any_of(words: Collection[str]) -> str:
    """Returns a regular expression that matches the longest of some words, in time that does not depend on their number."""
    heads: dict[str, list[str]] = {}
    for word in words:
        heads.setdefault(word[:1], []).append(word)
    is_optional = bool(heads.pop("", None))
    branches = []
    for group in heads.values():
        prefix = os.path.commonprefix(group)  # noqa: RUF071 - of words, no paths
        rests = [word[len(prefix) :] for word in group]
        branches.append(re.escape(prefix) + (any_of(rests) if any(rests) else ""))
    return f"(?:{'|'.join(branches)})" + "?" * is_optional


def _renamed(token: AddedToken, name: str) -> AddedToken:
    is_control = name != token.content
    return AddedToken(
        name,
        single_word=token.single_word and not is_control,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not is_control,
        special=False,
    )


def _unmasked(hexadecimal: str) -> str:
    return bytes.fromhex(hexadecimal).decode()
