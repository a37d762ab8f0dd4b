"""kept_responses: responses that a later request may continue by their id, in the memory of one process."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from serve_apps.extensions.responses.responses import Item, ResponsesRequest, chat_of
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.protocol import MAX_ECHO, ApiError

MAX_CHARACTERS = 8_000_000
"""Characters of the kept responses of one owner together; the oldest go first."""
ITEM_CHARACTERS = 500
"""What an item takes beside its text."""


class KeptResponses:
    """What was said up to each response, by its owner (a key, an agent) and its id. A later request may continue it."""

    def __init__(self, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_characters = max_characters
        self._items: dict[Hashable, OrderedDict[str, tuple[Sequence[Item], int]]] = {}

    def add(self, response_id: str, owner: Hashable, items: Sequence[Item]) -> None:
        """Keeps all items up to a response, its own included."""
        of_owner = self._items.setdefault(owner, OrderedDict())
        of_owner[response_id] = items, len(json.dumps(items)) + ITEM_CHARACTERS * len(items)
        while sum(size for _, size in of_owner.values()) > self._max_characters:
            of_owner.popitem(last=False)

    def items(self, response_id: str | None, owner: Hashable) -> Sequence[Item]:
        """Returns the items up to a response of this owner; none for None, ApiError 404 where they are not kept."""
        if response_id is None:
            return ()
        of_owner = self._items.get(owner)
        if of_owner is None or response_id not in of_owner:
            raise ApiError(
                404,
                f"response {response_id[:MAX_ECHO]!r} is not kept here: it was not stored, is too old, or another gateway replica "
                "gave it; send the whole conversation as input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        items, _ = of_owner[response_id]
        return items

    def conversation(
        self, body: ResponsesRequest, owner: Hashable
    ) -> tuple[ChatRequest, Callable[[dict[str, Any]], dict[str, Any]]]:
        """Returns the chat that a request asks for, and what keeps its response and returns it; ApiError 400 or 404."""
        earlier = self.items(body.previous_response_id, owner)

        def keep(response: dict[str, Any]) -> dict[str, Any]:
            if body.store is not False:
                self.add(response["id"], owner, [*earlier, *body.items, *response["output"]])
            return response

        return chat_of(body, earlier), keep
