"""text_stream: token ids as they come -> text that may be shown, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from serve_apps.chat.tokenizer import ChatTokenizer


class TextStream:
    """Decodes one completion token by token. Text that may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        self._stream = tokenizer.decode_stream()
        self._stops = tuple(stops)
        self._held = ""
        self.stop: str | None = None
        """The stop string that has come, before which the text ends; of several at one place the first in `stops`."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has come: sampling should end, too."""
        return self.stop is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens add and that no later token can change."""
        if self.is_stopped:
            return ""
        self._held += self._stream.push(token_ids)
        shown = self._before_stop(self._held)
        if self.is_stopped:
            self._held = ""
            return shown
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def end(self) -> str:
        """Returns the text that was held back, once no token follows."""
        if self.is_stopped:
            return ""
        text, self._held = self._held + self._stream.end(), ""
        return self._before_stop(text)

    def _before_stop(self, text: str) -> str:
        """Returns the text before the first stop string in it, which `stop` names from then on; all of it where there is none."""
        matches = [(position, stop) for stop in self._stops if (position := text.find(stop)) >= 0]
        if not matches:
            return text
        position, self.stop = min(matches, key=itemgetter(0))
        return text[:position]


def overlap(text: str, mark: str) -> int:
    """Returns how many characters at the end of `text` are the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
