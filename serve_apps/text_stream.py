"""text_stream: token ids as they come -> text that may be shown, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from serve_apps.tokenizer import ChatTokenizer


class TextStream:
    """Decodes one completion token by token. Text that may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str]) -> None:
        self._stream = tokenizer.decode_stream()
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False
        """True once a stop string has come: the text ends before it, and sampling should end, too."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens add and that no later token can change."""
        if self.is_stopped:
            return ""
        self._held += self._stream.push(token_ids)
        positions = [position for position in (self._held.find(stop) for stop in self._stops) if position >= 0]
        if positions:
            self.is_stopped = True
            shown, self._held = self._held[: min(positions)], ""
            return shown
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def end(self) -> str:
        """Returns the text that was held back, once no token follows."""
        if self.is_stopped:
            return ""
        shown = self._held + self._stream.end()
        self._held = ""
        positions = [position for position in (shown.find(stop) for stop in self._stops) if position >= 0]
        return shown[: min(positions)] if positions else shown


def overlap(text: str, mark: str) -> int:
    """Returns how many characters at the end of `text` are the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
