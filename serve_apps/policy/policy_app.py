"""policy_app: token ids in -> token ids and logprobs out, from an engine whose weights change in place.

    generate                 ──> Generation ────────────────────┐
    reconfigure(user_config) ──> Versions, EngineSleep ─────────┼──> Engine (see serve_apps/engines/port.py)
    probe, statuses          ──> both, for the proof of a sync ─┘

Serve keeps the wanted version in `user_config`: changing it reconfigures every replica in place, and a replica that
(re)starts is handed the same `user_config`, so it ends with the right version by itself. Weights that fail a check are
kept out: the replica goes on with the old ones and reports it in `statuses()`. Model groups that are adapters of one base
share an app: their requests name them, and each has a version of its own. An engine is imported in the
replica only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from ray import serve

from serve_apps.config import ServeConfig
from serve_apps.engines.port import AdapterRoom, EngineDeadError, Piece, Progress, engine_class
from serve_apps.policy.engine_sleep import ASLEEP_UNTIL, EngineSleep
from serve_apps.policy.generation import Generation
from serve_apps.policy.priority import LOW_PRIORITY, has_low_priority, set_process_priority
from serve_apps.policy.versions import Versions
from stores.logs import bound, configure
from stores.types import GenerateRequest, ModelVersionRef
from stores.weights.model_folder import vocabulary_rows
from stores.weights.weight_cache import fetch

logger = logging.getLogger(__name__)

DEPLOYMENT = "Policy"
DRAIN_TIMEOUT_S = 30
"""Seconds that a replica has to finish its requests once it is asked to stop."""
WATCH_S = 0.5
"""How often a replica checks that its engine is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyArgs:
    """Holds the arguments that a policy app is started with; plain values on the wire."""

    model_group: str
    """The model group that the app serves, or the base that several share."""
    model: ModelVersionRef
    """The version that a replica loads first. Unless it is a base, `user_config` may name a later one."""
    serve: ServeConfig
    adapters: AdapterRoom | None = None
    """The room for adapters where the model is a base that model groups share; else None."""
    threads: int = field(default=1, compare=False)
    """The CPU threads of an engine, which follow from `serve.threads` and the machine."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values only."""
        plain: dict[str, Any] = {
            "model_group": self.model_group,
            "model": asdict(self.model),
            "serve": self.serve.model_dump(mode="json"),
        }
        if self.threads != _threads(self.serve):
            plain["threads"] = self.threads
        return plain | {"adapters": asdict(self.adapters)} if self.adapters else plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicyArgs:
        """Is the inverse of `to_dict`; raises pydantic's error or TypeError for anything else."""
        room = data.get("adapters")
        serve = ServeConfig.model_validate(data["serve"])
        return cls(
            model_group=data["model_group"],
            model=ModelVersionRef(**data["model"]),
            serve=serve,
            threads=data.get("threads", _threads(serve)),
            adapters=None if room is None else AdapterRoom(**{k: _tuple(v) for k, v in room.items()}),
        )


def _threads(serve: ServeConfig) -> int:
    """The threads of an engine where nobody has looked at the machine."""
    return 1 if serve.threads == "auto" else serve.threads


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def build_app(args: dict[str, Any]) -> serve.Application:
    """Returns a Serve application with one deployment, `Policy`. Args: args: `PolicyArgs.to_dict()`."""
    parsed = PolicyArgs.from_dict(args)
    config = parsed.serve
    environment = engine_class(config.engine_kind).environment(config, threads=parsed.threads)
    return Policy.options(  # type: ignore[attr-defined]
        num_replicas=config.num_replicas,
        ray_actor_options={
            "num_cpus": config.cpus,
            "num_gpus": config.gpus,
            "runtime_env": {"env_vars": environment},
        },
        max_ongoing_requests=4096,
        max_constructor_retry_count=2,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=max(30.0, 3 * config.health_check_period_s),
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
    ).bind(args)


@serve.deployment(name=DEPLOYMENT)
class Policy:
    """Runs one replica: an engine, the versions that it serves and the result of the last change of version."""

    def __init__(self, args: dict[str, Any]) -> None:
        """Starts the engine on the version in `args`; Serve then calls `reconfigure` with the wanted one."""
        configure()
        self._args = PolicyArgs.from_dict(args)
        self._change = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._prepared: asyncio.Future[None] | None = None
        started = time.perf_counter()
        folder = fetch(self._args.model)
        room = self._args.adapters
        kind = engine_class(self._args.serve.engine_kind)
        self._engine = kind(self._args.serve, folder, version=self._args.model.version, room=room)
        self._versions = Versions(self._engine, self._args.model, room)
        self._generation = Generation(self._engine, self._versions)
        self._sleep = EngineSleep(self._engine)
        self._start_s = time.perf_counter() - started
        with self._log_context():
            logger.info("engine is up with version %d after %.1f s", self._args.model.version, self._start_s)
            vocabulary = vocabulary_rows(folder)
            if vocabulary is not None and vocabulary.num_padded:
                rows = (vocabulary.num_padded, vocabulary.num_rows)
                logger.info("%d of %d rows of the vocabulary stand for no token and are masked", *rows)

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(self, requests: list[GenerateRequest]) -> AsyncIterator[list[tuple[int, Piece]] | Progress]:
        """Streams pieces of the completions, and in between how far they are: see `Generation.run`.

        When the engine is gone the replica ends: what was not yielded by then has to be repeated elsewhere. When the caller goes
        away the sampling ends.
        """
        await self._prepare_engine()
        try:
            async with aclosing(self._generation.run(requests)) as messages:
                async for message in messages:
                    yield message
        except EngineDeadError:
            self._end()

    async def probe(
        self, sequences: Mapping[str, Sequence[Sequence[int]]]
    ) -> tuple[list[dict[str, Any]], dict[str, list[list[float]]]]:
        """Returns `statuses()` and `Engine.probe(sequences)` of this replica, for the proof of a sync."""
        logprobs = await self._engine.probe(sequences)
        return await self.statuses(), logprobs

    # -- versions -----------------------------------------------------------------------------------------------

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Makes the versions in `user_config` live, or keeps the old weights and records why.

        `user_config` is {version, uri, manifest_sha256}, or where the groups are adapters {adapters: {model group: the
        same}}. Either may ask for low priority (see priority.py) and for sleep (see engine_sleep.py), and have an `attempt`, which
        only makes it differ. Never raises for bad weights: Serve would kill the replica.
        """
        self._set_priority(bool(user_config.get(LOW_PRIORITY)))
        until = float(user_config.get(ASLEEP_UNTIL) or 0.0)
        should_sleep = until > time.time()  # a replica that starts later than that has nothing to wait for
        self._sleep.expect(is_asleep=should_sleep)
        settings = user_config.get("adapters", {self._args.model_group: user_config})
        wanted = {group: _ref_of(group, about) for group, about in settings.items()}
        async with self._change:  # Serve may hand over the next version while one is loaded
            await self._prepare_engine()
            with self._log_context():
                if not should_sleep:
                    await self._sleep.wake()
                if not self._sleep.is_asleep:  # weights cannot change in an engine that sleeps
                    await self._versions.take(wanted)
                if should_sleep:
                    await self._sleep.sleep(until)

    def _set_priority(self, low_priority: bool) -> None:
        """Follows the app's settings.

        Ends this process where it may not return to normal priority: Serve starts another, which has it from the start.
        """
        if low_priority == has_low_priority():
            return
        try:
            set_process_priority(low_priority)
        except PermissionError:
            self._end("this process may not raise its priority")
        with self._log_context():
            logger.info("runs with %s priority", "low" if low_priority else "normal")

    async def retry(self) -> None:
        """Takes the wanted versions that were refused once more: their storage may answer by now."""
        states = self._versions.states.items()
        refused = {group: asdict(state.wanted) for group, state in states if state.error and state.wanted}
        if self._args.adapters is not None:
            await self.reconfigure({"adapters": refused, LOW_PRIORITY: has_low_priority()})
        elif refused:
            await self.reconfigure(refused[self._args.model_group] | {LOW_PRIORITY: has_low_priority()})

    async def _prepare_engine(self) -> None:
        """Has the engine begin once, and watches it from then on.

        Not in the constructor, which runs outside the event loop that the engine needs.
        """
        if self._prepared is None:
            self._prepared = asyncio.ensure_future(self._prepare_engine_once())
        await asyncio.shield(self._prepared)  # a caller may go away

    async def _prepare_engine_once(self) -> None:
        self._watch = asyncio.ensure_future(self._die_with_engine())
        await self._engine.begin()

    async def _die_with_engine(self) -> None:
        """Ends this replica soon after its engine is dead, also where nobody asks it anything."""
        try:
            while True:
                await self._engine.health()
                await asyncio.sleep(WATCH_S)
        except EngineDeadError:
            self._end()

    def _end(self, reason: str = "the engine is dead") -> NoReturn:
        """Ends this replica at once.

        Serve replaces a dead actor at once; failing health checks would take three periods. And a replica whose calls all
        fail is the one that is always free: the router would send it every call, and every repetition.
        """
        with self._log_context():
            logger.error("%s: this replica ends, Serve starts another", reason)
        os._exit(1)

    # -- state --------------------------------------------------------------------------------------------------

    async def statuses(self) -> list[dict[str, Any]]:
        """Returns what this replica serves, one status for each model group: see `ServingState.to_dict`."""
        replica = {
            "replica_id": serve.get_replica_context().replica_tag,
            "pid": os.getpid(),
            "start_s": self._start_s,
            "num_running": self._generation.num_running,
            LOW_PRIORITY: has_low_priority(),
            **self._sleep.status(),
        }
        return [replica | state.to_dict(group) for group, state in self._versions.states.items()]

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone, upon which Serve replaces the replica."""
        await self._engine.health()

    def _log_context(self) -> AbstractContextManager[None]:
        """Makes log lines inside the block name this app and model group."""
        return bound(app=serve.get_replica_context().app_name, model_group=self._args.model_group)


def _ref_of(model_group: str, about: Mapping[str, Any]) -> ModelVersionRef:
    return ModelVersionRef(
        model_group=model_group,
        version=int(about["version"]),
        uri=about["uri"],
        manifest_sha256=about["manifest_sha256"],
    )
