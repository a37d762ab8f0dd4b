"""template_refusals: whatever a chat template raises for the messages of a caller -> ApiError 400."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from serve_apps.openai_api.protocol import MAX_ECHO, ApiError


@contextmanager
def refusals_of_template() -> Iterator[None]:
    """Turns an error of the work inside into ApiError 400.

    A template is a program of somebody else, which reads what a caller sent: messages, tools, variables of any type. It may
    raise anything, and that is no fault of the gateway or of the team that answers.
    """
    try:
        yield
    except Exception as error:
        why = str(error)[:MAX_ECHO] or type(error).__name__
        raise ApiError(
            400, f"the chat template refuses these messages: {why}", code="invalid_value", param="messages"
        ) from error
