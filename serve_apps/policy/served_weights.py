"""served_weights: versions of one model group that is a whole model -> the weights of one vLLM engine, changed in place.

    take(version) -> fetch, check every byte -> stage: every worker loads and checks -> swap: between two engine steps

Weights that fail a check are kept out: the old ones stay live, with the reason in the state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_apps.policy.serving_state import Route, ServingState
from stores.types import ModelVersionRef
from stores.weights.manifest import read_manifest, verify_folder
from stores.weights.weight_cache import fetch

logger = logging.getLogger(__name__)


class ServedWeights:
    """Changes the weights of one engine. It has the methods of `ServedAdapters`, for a single model group."""

    def __init__(self, engine: Any, model: ModelVersionRef) -> None:
        """Changes nothing yet. Args: engine: an `AsyncLLM` that was started with the weights of `model`."""
        self._engine = engine
        self._live = model
        self._state = ServingState(live=model, wanted=model)
        self.states = {model.model_group: self._state}

    def route(self, model_group: str) -> Route:
        """Returns the whole model and its version, for any name: the policy app has one model group."""
        return Route(lora_request=None, version=self._live.version)

    async def take(self, wanted: Mapping[str, ModelVersionRef]) -> None:
        """Makes the version of the one model group live, or keeps the old weights and records why.

        Raises what a failed swap raises: it leaves a broken model, so Serve has to replace this replica.
        """
        (ref,) = wanted.values()
        self._state.wanted, self._state.error = ref, ""
        if (ref.manifest_sha256, ref.version) == (self._live.manifest_sha256, self._live.version):
            return
        try:
            folder = await asyncio.to_thread(_verified_folder, ref)
            await self._stage(folder)
        except (ValueError, OSError) as error:
            self._state.error = str(error)
            logger.warning("refused version %d and keeps %d: %s", ref.version, self._live.version, error)
            return
        await self._swap(ref)
        logger.info("serves version %d", ref.version)

    async def _stage(self, folder: Path) -> None:
        """Makes every worker load and check the weights; ValueError with the worker's message if one refuses them."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._engine.collective_rpc("troupe_stage", args=(str(folder),))
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001  vLLM turns every worker's exception into a plain Exception
            raise ValueError(str(error)) from None

    async def _swap(self, ref: ModelVersionRef) -> None:
        """Replaces the live weights by the staged ones between two engine steps; caches never outlive a version."""
        await self._engine.pause_generation(mode="keep", clear_cache=True)
        await self._engine.collective_rpc("troupe_swap")
        await self._engine.update_weight_version(str(ref.version))
        # Before generation goes on: the next token is of this version.
        self._live = self._state.live = ref
        await self._engine.resume_generation()


def _verified_folder(ref: ModelVersionRef) -> Path:
    """Returns a local folder with the files of `ref`, every byte checked; ValueError names what differs."""
    folder = fetch(ref)
    verify_folder(folder, read_manifest(ref))
    return folder
