"""kept_responses: responses that a later request may continue by their id, in the memory of one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from serve_apps.openai_api.protocol import ApiError
from serve_apps.openai_api.responses import Item, size_of

MAX_CHARACTERS = 32_000_000
"""Characters of all kept responses together; the oldest go first."""


class KeptResponses:
    """What was said up to each response, by its id and the name of the key that it answered."""

    def __init__(self, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_characters, self._num_characters = max_characters, 0
        self._items: OrderedDict[tuple[str, str], tuple[Sequence[Item], int]] = OrderedDict()

    def add(self, response_id: str, key: str, items: Sequence[Item]) -> None:
        """Keeps all items up to a response, its own included."""
        size = size_of(items)
        self._items[response_id, key] = items, size
        self._num_characters += size
        while self._num_characters > self._max_characters and self._items:
            _, (_, freed) = self._items.popitem(last=False)
            self._num_characters -= freed

    def items(self, response_id: str | None, key: str) -> Sequence[Item]:
        """Returns the items up to a response of this key; none for None, ApiError 404 where they are not kept."""
        if response_id is None:
            return ()
        kept = self._items.get((response_id, key))
        if kept is None:
            raise ApiError(
                404,
                f"response {response_id!r} is not kept here: it was not stored, is too old, or another gateway replica "
                "gave it; send the whole conversation as input",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return kept[0]
