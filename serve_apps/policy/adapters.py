"""adapters: versions of model groups that share a base -> the LoRA requests that one vLLM engine runs them through.

A version is a new adapter of the engine, under a name and an id of its own: `solver@3/1a2b3c4d`, the last part from the
hash of its manifest. vLLM keys the prefix cache by name and path, so nothing cached outlives a version, and a request
that is under way ends with the version it began with. Every request names an adapter: the bare base is not a policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from serve_apps.policy.serving_state import Route, ServingState
from serve_apps.policy.weights_extension import check_tensors, load_tensors
from stores.types import ModelVersionRef
from stores.weights.manifest import read_manifest, verify_folder
from stores.weights.weight_cache import fetch

logger = logging.getLogger(__name__)

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as `max_lora_rank`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """Describes the adapters that an engine has to have room for; plain values on the wire."""

    model_groups: tuple[str, ...]
    """The groups with one adapter each, all of one base."""
    max_rank: int
    target_modules: tuple[str, ...]
    """The layers that any of the adapters changes."""


def adapter_arguments(room: AdapterRoom) -> dict[str, Any]:
    """Returns keyword arguments of `AsyncEngineArgs`.

    Layers that no adapter changes are left as they are. That keeps the output head whole, too: wrapped for adapters it
    takes one row per request, and the engine dies of a request for the logprobs of its prompt, which every proof is.
    """
    num_groups = len(room.model_groups)
    return {
        "enable_lora": True,
        "max_loras": num_groups,
        "max_cpu_loras": 2 * num_groups,  # while versions change, requests under way still need the old ones
        "max_lora_rank": next(rank for rank in ENGINE_RANKS if rank >= room.max_rank),
        "lora_target_modules": list(room.target_modules),
    }


class ServedAdapters:
    """Holds the adapters of one engine, by model group."""

    def __init__(self, engine: Any, model_groups: Iterable[str]) -> None:
        """Loads nothing yet. Args: engine: an `AsyncLLM` with LoRA enabled."""
        self._engine = engine
        self.states = {group: ServingState() for group in model_groups}
        self._requests: dict[str, Any] = {}
        self._ids = count(1)

    def route(self, model_group: str) -> Route | None:
        """Returns the LoRA request and the version that the group is served with now; None while there is none."""
        state = self.states.get(model_group)
        if state is None or state.live is None:
            return None
        return Route(lora_request=self._requests[model_group], version=state.live.version)

    async def take(self, wanted: Mapping[str, ModelVersionRef]) -> None:
        """Makes these versions live, all at once; a bad one is kept out, and its state holds the reason."""
        loaded: dict[str, Any] = {}
        for group, ref in wanted.items():
            state = self.states[group]
            state.wanted, state.error = ref, ""
            if state.live == ref:
                continue
            try:
                loaded[group] = await self._load(ref, state.live)
            except (ValueError, OSError) as error:
                state.error = str(error)
                keeps = state.live.version if state.live else "nothing"
                logger.warning("%s: refused version %d and keeps %s: %s", group, ref.version, keeps, error)
        replaced = [self._requests[group] for group in loaded if group in self._requests]
        for group, request in loaded.items():
            self._requests[group], self.states[group].live = request, wanted[group]
            logger.info("%s: serves %s", group, request.lora_name)
        for request in replaced:  # the engine loads it once more for requests that are still under way with it
            await self._engine.remove_lora(request.lora_int_id)

    async def _load(self, ref: ModelVersionRef, before: ModelVersionRef | None) -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        folder = await asyncio.to_thread(_checked_folder, ref, before)
        name = f"{ref.model_group}@{ref.version}/{ref.manifest_sha256[:8]}"
        request = LoRARequest(lora_name=name, lora_int_id=next(self._ids), lora_path=str(folder))
        try:
            is_loaded = await self._engine.add_lora(request)
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001  vLLM turns every worker's exception into a plain Exception
            await self._engine.remove_lora(request.lora_int_id)
            raise ValueError(str(error)) from None
        if not is_loaded:
            raise ValueError(f"the engine did not load {name} from {folder}")
        return request


def _checked_folder(ref: ModelVersionRef, before: ModelVersionRef | None) -> Path:
    """Returns a local folder with the adapter, after a check of every byte, of its tensors' names and shapes, and
    for NaN."""
    folder, manifest = fetch(ref), read_manifest(ref)
    verify_folder(folder, manifest)
    shapes = (manifest if before is None else read_manifest(before)).tensors
    check_tensors(load_tensors(folder), {name: shape for name, (_, shape) in shapes.items()}, str(folder))
    return folder
