"""versions: the versions that an app should serve -> those that its engine serves, with the reason where they differ.

    take(versions) -> fetch, check every byte -> the engine loads them -> live

Weights that fail a check are kept out: the old ones stay live, with the reason in the state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_apps.engines.port import NO_VERSION, REFUSED, AdapterRoom, Engine, Piece
from stores.types import FinishReason, ModelVersionRef
from stores.weights.manifest import read_manifest, verify_folder
from stores.weights.weight_cache import fetch

logger = logging.getLogger(__name__)


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


class Versions:
    """Tells one engine which versions to serve."""

    def __init__(self, engine: Engine, model: ModelVersionRef, room: AdapterRoom | None) -> None:
        """Loads nothing yet. Args: model: what the engine was started with. room: where that is a base, the groups that share it."""
        self._engine, self._has_adapters = engine, room is not None
        self.states = (
            {model.model_group: ServingState(live=model, wanted=model)}
            if room is None
            else {group: ServingState() for group in room.model_groups}
        )

    async def take(self, wanted: Mapping[str, ModelVersionRef]) -> None:
        """Makes these versions live, all as soon as each is checked; a bad one is kept out, and its state holds the reason.

        Raises what a broken engine raises: Serve has to replace this replica.
        """
        folders: dict[str, Path] = {}
        for group, ref in wanted.items():
            state = self.states[group]
            state.wanted, state.error = ref, ""
            if state.live is not None and _identity(state.live) == _identity(ref):
                continue
            try:
                folders[group] = await asyncio.to_thread(_verified_folder, ref)
            except (ValueError, OSError) as error:
                self._refuse(group, error)
        for group, folder in folders.items():
            try:
                await self._engine.load(wanted[group], folder)
            except (
                ValueError
            ) as error:  # any other one leaves the engine broken, an OSError such as TimeoutError as well
                self._refuse(group, error)
                continue
            self.states[group].live = wanted[group]
            logger.info("%s: serves version %d", group, wanted[group].version)

    def _refuse(self, group: str, error: Exception) -> None:
        state = self.states[group]
        state.error = str(error) or type(error).__name__
        wanted, keeps = (ref.version if ref else "nothing" for ref in (state.wanted, state.live))
        logger.warning("%s: refused version %s and keeps %s: %s", group, wanted, keeps, state.error)

    def why_unanswered(self, model_group: str) -> Piece | None:
        """Returns the answer to a request of a group that nothing is served for; None for others.

        A whole model answers for any name. A group whose adapter could not be loaded may be answered by another replica, or later.
        """
        state = self.states.get(model_group)
        if not self._has_adapters or (state is not None and state.live is not None):
            return None
        begin = f"no adapter of {model_group!r} is live"
        if state is None:
            return Piece(finish_reason=REFUSED, error=f"{begin}; groups are {', '.join(self.states)}")
        why = state.error or "it is being loaded"
        return Piece(finish_reason=FinishReason.ABORT.value, policy_version=NO_VERSION, error=f"{begin}: {why}")


def _identity(ref: ModelVersionRef) -> tuple[int, str]:
    """The version alone is not enough: a run that is begun again counts from 0."""
    return ref.version, ref.manifest_sha256


def _verified_folder(ref: ModelVersionRef) -> Path:
    """Returns a local folder with the files of `ref`, every byte checked; ValueError names what differs."""
    folder = fetch(ref)
    verify_folder(folder, read_manifest(ref))
    return folder
