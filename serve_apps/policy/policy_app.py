"""policy_app: token ids in -> token ids and logprobs out, from a vLLM engine whose weights change in place.

Serve keeps the wanted version in `user_config`: changing it reconfigures every replica in place, and a replica that
(re)starts is handed the same `user_config`, so it ends with the right version by itself. Weights that fail a check are
kept out: the replica goes on with the old ones and says so in `statuses()`. Model groups that are adapters of one base
share an app: their requests name them, and each has a version of its own. Imports of vLLM happen in the replica only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from ray import serve

from serve_apps.config import ServeConfig
from serve_apps.policy.adapters import AdapterRoom, Place, ServedAdapters, adapter_arguments
from serve_apps.policy.priority import LOW_PRIORITY, has_low_priority, set_process_priority
from stores.logs import bound, configure
from stores.manifest import read_manifest, verify_folder
from stores.types import FinishReason, ModelVersionRef
from stores.weight_cache import fetch

logger = logging.getLogger(__name__)

DEPLOYMENT = "Policy"
FLUSH_S = 0.01
"""How long finished completions wait for company before they are sent back in one message."""

WATCH_S = 0.5
"""How often a replica looks whether its engine is alive."""

WireRequest = tuple[int, Sequence[int], int, float, float, int, float, str, int]
"""(key, prompt_token_ids, max_tokens, temperature, top_p, top_k, min_p, model_group, seed); `key` comes back with the
result."""
WireResult = tuple[int, list[int], list[float], str, int, bool, str]
"""(key, token_ids, logprobs, finish_reason, policy_version, is_version_mixed, error); where a request cannot run the
finish reason is CONTEXT or REFUSED and `error` says why."""

WireDelta = tuple[list[int], list[float], list[dict[int, float]], str, int, str]
"""(token_ids, logprobs, the most likely tokens at each place, finish_reason or empty, policy_version, error): what is new of a
streamed completion."""

CONTEXT = "context"
REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyArgs:
    """What a policy app is started with; plain values on the wire."""

    model_group: str
    """Or the base that several share."""
    model: ModelVersionRef
    """The version that a replica loads first; `user_config` may name a later one, unless it is a base."""
    serve: ServeConfig
    adapters: AdapterRoom | None = None
    """Where the model is a base that model groups share."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values only."""
        whole = {
            "model_group": self.model_group,
            "model": asdict(self.model),
            "serve": self.serve.model_dump(mode="json"),
        }
        return whole | {"adapters": asdict(self.adapters)} if self.adapters else whole

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicyArgs:
        """The inverse of `to_dict`; raises pydantic's error or TypeError for anything else."""
        room = data.get("adapters")
        return cls(
            model_group=data["model_group"],
            model=ModelVersionRef(**data["model"]),
            serve=ServeConfig.model_validate(data["serve"]),
            adapters=None if room is None else AdapterRoom(**{k: _tuple(v) for k, v in room.items()}),
        )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def build_app(args: dict[str, Any]) -> serve.Application:
    """A Serve application with one deployment, `Policy`, from `PolicyArgs.to_dict()`."""
    config = PolicyArgs.from_dict(args).serve
    return Policy.options(  # type: ignore[attr-defined]
        num_replicas=config.num_replicas,
        ray_actor_options={
            "num_cpus": config.cpus,
            "num_gpus": config.gpus,
            "runtime_env": {"env_vars": engine_environment(config)},
        },
        max_ongoing_requests=4096,
        max_constructor_retry_count=2,
        health_check_period_s=config.health_check_period_s,
        health_check_timeout_s=max(30.0, 3 * config.health_check_period_s),
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
    ).bind(args)


def engine_environment(config: ServeConfig) -> dict[str, str]:
    """Environment of a replica: no network, few logs, and on a CPU the thread count without pinning.

    vLLM's own pinning puts every engine on the same first core; unpinned engines share the cores with the trainers.
    """
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.gpus == 0:
        env |= {
            "OMP_NUM_THREADS": str(config.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",  # saves 3 s in the first call, and the need for a compiler
        }
        if config.tensor_parallel_size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # lets the engine core run its worker in its own process
    return env


def engine_arguments(config: ServeConfig, model: Path, adapters: AdapterRoom | None = None) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`; what `config.engine` sets wins."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "worker_extension_cls": "serve_apps.policy.weights_extension.WeightsExtension",
        "generation_config": "vllm",
    }
    if config.gpus == 0:
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
            # A seeded request whose prefill is cut into chunks rewinds its generator, which a CPU generator cannot:
            # the engine would die ("CPU Generator does not use offset").
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(8192, config.max_model_len),
        }
        if config.tensor_parallel_size == 1:
            arguments["distributed_executor_backend"] = "uni"
    elif config.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"  # the replica holds the GPUs; no Ray actors of vLLM's own
    if adapters is not None:
        arguments |= adapter_arguments(adapters)
    return arguments | config.engine


@serve.deployment(name=DEPLOYMENT)
class Policy:
    """One replica: an engine, the version it serves and how the last change of version went."""

    def __init__(self, args: dict[str, Any]) -> None:
        """Starts the engine on the version in `args`; Serve then calls `reconfigure` with the wanted one."""
        configure()
        self._args = PolicyArgs.from_dict(args)
        self._live = self._args.model
        self._wanted = self._args.model
        self._error = ""
        self._adapters: ServedAdapters | None = None
        self._change = asyncio.Lock()
        self._num_requests = 0
        started = time.perf_counter()
        self._start_engine(fetch(self._live))
        self._start_s = time.perf_counter() - started
        with self._named():
            logger.info("engine is up with version %d after %.1f s", self._live.version, self._start_s)
        self._watch: asyncio.Task[None] | None = None

    def _start_engine(self, folder: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = self._args.serve
        self._folder = folder
        room = self._args.adapters
        arguments = engine_arguments(config, folder, room)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        if room is not None:
            self._adapters = ServedAdapters(self._engine, room.model_groups)
        self._stop_token_ids = stop_token_ids(folder)
        self._max_model_len = self._engine.model_config.max_model_len

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate_batch(self, requests: list[WireRequest]) -> AsyncIterator[list[WireResult]]:
        """Streams results, several at a time, as completions finish, in no particular order.

        A request that does not fit into the context comes back as an error by itself. When the engine is gone the replica
        ends: what was not yielded by then has to be repeated elsewhere.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        await self._greet_engine()
        finished: list[WireResult] = []
        pending: set[asyncio.Task[WireResult]] = set()
        try:
            for request in requests:
                excess = len(request[1]) + request[2] - self._max_model_len
                if excess > 0:
                    finished.append(self._error_result(request, CONTEXT, self._excess_message(request, excess)))
                else:
                    pending.add(asyncio.ensure_future(self._generate(request)))
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if pending:
                    late, pending = await asyncio.wait(pending, timeout=FLUSH_S)
                    done |= late
                finished.extend(task.result() for task in done)
                yield finished
                finished = []
            if finished:
                yield finished
        except EngineDeadError:
            self._end()
        finally:
            for task in pending:
                task.cancel()

    def _excess_message(self, request: WireRequest, excess: int) -> str:
        return (
            f"prompt of {len(request[1])} tokens + max_tokens {request[2]} exceeds serve.max_model_len = "
            f"{self._max_model_len} by {excess}"
        )

    def _error_result(self, request: WireRequest, reason: str, message: str) -> WireResult:
        return request[0], [], [], reason, self._live.version, False, message

    async def _generate(self, request: WireRequest) -> WireResult:
        from vllm.sampling_params import RequestOutputKind

        key, prompt, model_group = request[0], request[1], request[7]
        adapter = self._adapters.request_of(model_group) if self._adapters else None
        if self._adapters and adapter is None:
            served = ", ".join(self._adapters.places)
            return self._error_result(request, REFUSED, f"no adapter of {model_group!r} is live; groups are {served}")
        try:
            params = self._params(request, kind=RequestOutputKind.FINAL_ONLY)
            output = await self._final_output(prompt, params, adapter and adapter[0])
        except ValueError as error:  # how vLLM refuses a single request
            return self._error_result(request, REFUSED, str(error))
        completion = output.outputs[0]
        spans = completion.weight_versions or ()
        version = int(spans[-1].version) if spans else self._live.version
        if adapter:  # the spans are the base's
            version, spans = adapter[1], ()
        logprobs = completion.logprobs.logprobs if completion.logprobs is not None else []
        reason = completion.finish_reason or FinishReason.ABORT.value
        return key, list(completion.token_ids), list(logprobs), reason, version, len(spans) > 1, ""

    async def generate_stream(self, request: WireRequest, more: Mapping[str, Any]) -> AsyncIterator[WireDelta]:
        """Streams one completion as it is sampled. Ends early, its slot freed, when the caller goes away.

        Args:
            more: `top_logprobs`, how many of the most likely tokens to name at each place; `is_whole`: one delta at the
                end; penalties of vLLM's `SamplingParams`, which what is trained on never has.

        The last delta has the finish reason, CONTEXT or REFUSED, with the error, where the request cannot run.
        """
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        await self._greet_engine()
        excess = len(request[1]) + request[2] - self._max_model_len
        if excess > 0:
            yield [], [], [], CONTEXT, self._live.version, self._excess_message(request, excess)
            return
        adapter = self._adapters.request_of(request[7]) if self._adapters else None
        version = adapter[1] if adapter else self._live.version
        settings = dict(more)
        num_top = settings.pop("top_logprobs", 0)
        kind = RequestOutputKind.FINAL_ONLY if settings.pop("is_whole", False) else RequestOutputKind.DELTA
        self._num_requests += 1
        tokens: Any = {"type": "token", "prompt_token_ids": list(request[1])}
        try:
            params = self._params(request, kind=kind, logprobs=num_top, **settings)
            outputs = self._engine.generate(
                tokens, params, str(self._num_requests), lora_request=adapter and adapter[0]
            )
            async for output in outputs:
                completion = output.outputs[0]
                flat = completion.logprobs
                spans = completion.weight_versions or ()
                version = int(spans[-1].version) if spans and not adapter else version
                own, top = _place_logprobs(flat, completion.token_ids, num_top) if flat is not None else ([], [])
                yield list(completion.token_ids), own, top, completion.finish_reason or "", version, ""
        except ValueError as error:  # how vLLM refuses a single request
            yield [], [], [], REFUSED, version, str(error)
        except EngineDeadError:
            self._end()

    def _params(self, request: WireRequest, *, kind: Any, logprobs: int = 0, **more: Any) -> Any:
        from vllm.sampling_params import SamplingParams

        _, _, max_tokens, temperature, top_p, top_k, min_p, _, seed = request
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            logprobs=logprobs,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=self._stop_token_ids,
            output_kind=kind,
            **more,
        )

    async def _final_output(self, prompt: Sequence[int], params: Any, adapter: Any = None) -> Any:
        """The one output of a FINAL_ONLY request, through an adapter if one is given."""
        self._num_requests += 1
        tokens: Any = {"type": "token", "prompt_token_ids": list(prompt)}
        async for output in self._engine.generate(tokens, params, str(self._num_requests), lora_request=adapter):
            final = output
        return final

    async def probe_logprobs(self, sequences: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[list[float]]]:
        """By model group: log p(seq[j+1] | seq[:j+1]) of its sequences, `len(seq) - 1` each, under the served weights.

        The prefix cache is not read: the weights answer, not what an older version left behind.
        """
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            skip_reading_prefix_cache=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        found = {group: self._adapters and self._adapters.request_of(group) for group in sequences}
        asked = [(group, tokens) for group, of_group in sequences.items() for tokens in of_group]
        outputs = await asyncio.gather(
            *(self._final_output(tokens, params.clone(), (found[g] or [None])[0]) for g, tokens in asked)
        )
        answers: dict[str, list[list[float]]] = {group: [] for group in sequences}
        for (group, _), output in zip(asked, outputs, strict=True):
            answers[group].append(_prompt_logprobs(output))
        return answers

    # -- versions -----------------------------------------------------------------------------------------------

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Makes `user_config` {version, uri, manifest_sha256; `attempt` is Serve's alone} live, or keeps the old weights and says why.

        Where the groups are adapters it is {adapters: {model group: {version, uri, manifest_sha256}}}; in both it may say
        that the replica stands back (see priority.py). Never raises for bad weights: Serve would kill the replica.
        """
        self._set_priority(bool(user_config.get(LOW_PRIORITY)))
        if self._adapters is not None:
            adapters = {group: _ref_of(group, about) for group, about in user_config["adapters"].items()}
            async with self._change:
                await self._greet_engine()
                with self._named():
                    await self._adapters.take(adapters)
            return
        wanted = _ref_of(self._args.model_group, user_config)
        async with self._change:
            await self._greet_engine()
            self._wanted, self._error = wanted, ""
            if wanted.manifest_sha256 == self._live.manifest_sha256 and wanted.version == self._live.version:
                return
            try:
                folder = await asyncio.to_thread(_verified_folder, wanted)
                await self._stage(folder)
            except (ValueError, OSError) as error:
                self._error = str(error)
                with self._named():
                    logger.warning("refused version %d and keeps %d: %s", wanted.version, self._live.version, error)
                return
            await self._swap(wanted)
            with self._named():
                logger.info("serves version %d", wanted.version)

    def _set_priority(self, low_priority: bool) -> None:
        """As the app's settings say; ends where this process may not come forward any more: the next one starts there."""
        if low_priority == has_low_priority():
            return
        try:
            set_process_priority(low_priority)
        except PermissionError:
            self._end("this process may not raise its priority")
        with self._named():
            logger.info("stands back" if low_priority else "has come forward")

    async def retry(self) -> None:
        """Takes the wanted version once more, where it was refused: its storage may answer by now."""
        if self._adapters is not None:
            places = self._adapters.places.items()
            bad = {group: asdict(place.wanted) for group, place in places if place.error and place.wanted}
            await self.reconfigure({"adapters": bad, LOW_PRIORITY: has_low_priority()})
        elif self._error:
            await self.reconfigure(asdict(self._wanted) | {LOW_PRIORITY: has_low_priority()})

    async def _stage(self, folder: Path) -> None:
        """Every worker loads and checks the weights; ValueError with the worker's message if one refuses them."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._engine.collective_rpc("troupe_stage", args=(str(folder),))
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001  vLLM turns every worker's exception into a plain Exception
            raise ValueError(str(error)) from None

    async def _swap(self, wanted: ModelVersionRef) -> None:
        """The staged weights replace the live ones between two engine steps; caches never outlive a version.

        A swap that fails leaves a broken model: the exception goes to Serve, which replaces this replica.
        """
        await self._engine.pause_generation(mode="keep", clear_cache=True)
        await self._engine.collective_rpc("troupe_swap")
        await self._engine.update_weight_version(str(wanted.version))
        self._live = wanted
        await self._engine.resume_generation()

    async def _greet_engine(self) -> None:
        """Once: tells the engine what it was started with, and watches it from then on."""
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._die_with_engine())
            await self._engine.update_weight_version(str(self._live.version))
            await self._engine.collective_rpc("troupe_expect", args=(str(self._folder),))

    async def _die_with_engine(self) -> None:
        """Ends this replica soon after its engine is dead, also where nobody asks it anything."""
        while not self._engine.errored:
            await asyncio.sleep(WATCH_S)
        self._end()

    def _end(self, reason: str = "the engine is dead") -> NoReturn:
        """Ends this replica at once.

        Serve replaces a dead actor at once; failing health checks would take three periods. And a replica whose calls all
        fail is the one that is always free: the router would send it every call, and every repetition.
        """
        with self._named():
            logger.error("%s: this replica ends, Serve starts another", reason)
        os._exit(1)

    def _named(self) -> AbstractContextManager[None]:
        """Log lines inside say which app and model group this is."""
        return bound(app=serve.get_replica_context().app_name, model_group=self._args.model_group)

    # -- state --------------------------------------------------------------------------------------------------

    async def statuses(self) -> list[dict[str, Any]]:
        """Who serves what, one for each model group: see `Place.to_dict`."""
        places = {self._args.model_group: Place(self._live, self._wanted, self._error)}
        if self._adapters is not None:
            places = self._adapters.places
        replica = {
            "replica_id": serve.get_replica_context().replica_tag,
            "pid": os.getpid(),
            "start_s": self._start_s,
            "num_running": self._engine.output_processor.get_num_unfinished_requests(),
            LOW_PRIORITY: has_low_priority(),
        }
        return [replica | place.to_dict(group) for group, place in places.items()]

    async def probe(
        self, sequences: Mapping[str, Sequence[Sequence[int]]]
    ) -> tuple[list[dict[str, Any]], dict[str, list[list[float]]]]:
        """`statuses()` and `probe_logprobs(sequences)` of this replica, for the proof of a sync."""
        logprobs = await self.probe_logprobs(sequences)
        return await self.statuses(), logprobs

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is gone, upon which Serve replaces the replica."""
        await self._engine.check_health()


def _ref_of(model_group: str, about: Mapping[str, Any]) -> ModelVersionRef:
    return ModelVersionRef(
        model_group=model_group,
        version=int(about["version"]),
        uri=about["uri"],
        manifest_sha256=about["manifest_sha256"],
    )


def _verified_folder(ref: ModelVersionRef) -> Path:
    """A local folder with the files of `ref`, every byte checked; ValueError names what differs."""
    folder = fetch(ref)
    verify_folder(folder, read_manifest(ref))
    return folder


def stop_token_ids(folder: Path) -> list[int]:
    """The end-of-sequence tokens that a model folder declares, generation_config.json before config.json."""
    import json

    for name in ("generation_config.json", "config.json"):
        file = folder / name
        eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return [eos] if isinstance(eos, int) else list(eos)
    return []


def _place_logprobs(flat: Any, token_ids: Sequence[int], num_top: int) -> tuple[list[float], list[dict[int, float]]]:
    """Of a delta: the logprob of each sampled token, and the `num_top` most likely tokens at its place."""
    if not num_top:
        return list(flat.logprobs), []
    own, top = [], []
    for place, token in enumerate(token_ids):
        start, end = flat.start_indices[place], flat.end_indices[place]
        found = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        own.append(found[token])
        top.append(dict(sorted(found.items(), key=lambda item: -item[1])[:num_top]))
    return own, top


def _prompt_logprobs(output: Any) -> list[float]:
    """Logprobs of the prompt's own tokens after the first, which has none."""
    flat = output.prompt_logprobs
    token_ids = output.prompt_token_ids
    values = []
    for position in range(1, len(token_ids)):
        start, end = flat.start_indices[position], flat.end_indices[position]
        values.append(flat.logprobs[flat.token_ids.index(token_ids[position], start, end)])
    return values
