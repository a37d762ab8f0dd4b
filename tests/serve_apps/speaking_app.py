"""speaking_app: a policy app without an engine, which says the same text to everybody, slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve

from serve_apps.engines.port import Piece
from serve_apps.policy.app_list import new_entry
from stores.types import GenerateRequest

SECONDS = 0.02
"""Before each token."""


def speaker_entry(name: str, token_ids: list[int]) -> dict[str, Any]:
    """Returns the app's entry in Serve's config."""
    path = "tests.serve_apps.speaking_app:build_app"
    return new_entry(name, import_path=path, args={"token_ids": token_ids}, deployment="Speaker", user_config={})


def build_app(args: dict[str, Any]) -> serve.Application:
    """Builds the app from {"token_ids"}."""
    return Speaker.bind(args["token_ids"])  # type: ignore[attr-defined]


@serve.deployment(name="Speaker", max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})
class Speaker:
    """Answers as `Policy.generate`."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def reconfigure(self, _: Mapping[str, Any]) -> None:
        """Has nothing to change."""

    async def generate(self, requests: list[GenerateRequest]) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Says the text again until `max_tokens` are said."""
        (request,) = requests
        for index in range(request.sampling.max_tokens):
            await asyncio.sleep(SECONDS)
            token = self._token_ids[index % len(self._token_ids)]
            reason = "length" if index == request.sampling.max_tokens - 1 else ""
            yield [(0, Piece([token], [-0.5], reason, 3))]
