"""foreign_text: what models, programs and errors say -> text for a terminal, which obeys neither its markup nor its control characters."""

from __future__ import annotations

from typing import Any

from rich.text import Text

CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
"""Control characters (Unicode's category Cc) but tab and line feed: ESC begins the sequences by which a terminal is told what to do."""


class ForeignText(Text):
    """Text as it is, also where it has `[...]`; control characters are replaced."""

    def __init__(self, text: str = "", *args: Any, **kwargs: Any) -> None:
        """Takes what `Text` takes, and replaces control characters in it."""
        super().__init__(text.translate(CONTROL), *args, **kwargs)

    def append(self, text: Any, style: Any = None) -> Text:
        """Appends as `Text` does, without control characters; `Text.assemble` comes here, too."""
        return super().append(text.translate(CONTROL) if isinstance(text, str) else text, style)
