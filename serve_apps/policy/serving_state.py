"""serving_state: which version a replica serves a model group with, and which it should -> the line of its status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from stores.types import ModelVersionRef


@dataclass(slots=True)
class ServingState:
    """Holds the version that one model group is served with, and the one that it should be."""

    live: ModelVersionRef | None = None
    wanted: ModelVersionRef | None = None
    error: str = ""
    """The reason why the wanted version was refused; empty where it was not."""

    def to_dict(self, model_group: str) -> dict[str, Any]:
        """Returns plain values; `state` is "bad" while the wanted version was refused."""
        live, wanted = self.live, self.wanted
        return {
            "model_group": model_group,
            "version": live.version if live else None,
            "manifest_sha256": live.manifest_sha256 if live else "",
            "wanted_version": wanted.version if wanted else None,
            "wanted_sha256": wanted.manifest_sha256 if wanted else "",
            "state": "bad" if self.error else "ok",
            "error": self.error,
        }


class Route(NamedTuple):
    """Tells how a request of a model group goes through the engine."""

    lora_request: Any
    """vLLM's request for the group's adapter; None where the group is a whole model."""
    version: int
