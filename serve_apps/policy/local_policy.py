"""local_policy: a model call -> a completion that transformers samples in this process. It is slow, and needs no cluster.

It serves a registered team where no gateway runs. Its samples have an engine's distribution, but they are other samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from serve_apps.config import ServeConfig
from serve_apps.engines.port import AdapterRoom, Engine
from serve_apps.engines.transformers_engine import TransformersEngine
from serve_apps.policy.client import completion_of
from stores.types import Completion, GenerateRequest, ModelVersionRef
from stores.weights.manifest import read_manifest, whole_model
from stores.weights.weight_cache import fetch

SETTINGS = ServeConfig(engine_kind="transformers", dtype="auto")


class LocalPolicy:
    """Implements PolicyClient over model versions, each loaded with its first call."""

    def __init__(self, models: Mapping[str, ModelVersionRef]) -> None:
        self._refs = dict(models)
        self._engines: dict[str, Engine] = {}
        self._lock = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Returns one completion; ValueError where the version's files are gone."""
        async with self._lock:
            engine = await self._engine(request.model_group)
            async with aclosing(engine.generate(request)) as pieces:
                return completion_of(await anext(pieces), request)

    async def _engine(self, group: str) -> Engine:
        if group not in self._engines:
            ref = self._refs[group]
            base = whole_model(ref)
            is_adapter = read_manifest(ref).base is not None
            room = AdapterRoom(model_groups=(group,), max_rank=0, target_modules=()) if is_adapter else None
            engine = await asyncio.to_thread(
                lambda: TransformersEngine(SETTINGS, fetch(base), version=base.version, room=room)
            )
            if is_adapter:
                await engine.load(ref, fetch(ref))
            self._engines[group] = engine
        return self._engines[group]
