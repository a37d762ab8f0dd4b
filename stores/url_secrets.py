"""url_secrets: texts that may be URLs -> the same without the passwords in them. Standard library only."""

from __future__ import annotations

import re

HIDDEN = "..."
USER = re.compile(r"(?<=://)(?P<begin>[^\s/?#:@]*:)(?P<secret>[^\s/?#]+)(?=@)")
"""What stands between the user and the host."""
OPTION = re.compile(
    r"(?P<begin>[?&;][A-Za-z0-9_.-]*(?:password|passwd|pwd|secret|token|access_key)=)(?P<secret>[^\s&;#]+)",
    re.IGNORECASE,
)
"""An option whose name says that it is secret."""


def without_secrets(text: str) -> str:
    """Returns a text with `...` for every password in its URLs."""
    if "://" not in text:
        return text
    for pattern in (USER, OPTION):
        text = pattern.sub(lambda match: match["begin"] + HIDDEN, text)
    return text
