"""engine: vLLM's `AsyncLLM` behind the port. vLLM is imported where an engine runs, and nowhere else.

A whole model changes in place: every worker loads and checks the new weights, then all swap between two engine steps.

Adapters: a version is a new adapter of the engine, under a name and an id of its own, `solver@3/1a2b3c4d`, the last part from the
hash of its manifest. vLLM keys the prefix cache by name and path, so nothing cached outlives a version, and a request that is
under way ends with the version it began with. Every request names an adapter: the bare base is not a policy.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from serve_apps.chat.tokenizer import stop_token_ids
from serve_apps.config import ServeConfig
from serve_apps.engines.port import (
    NO_VERSION,
    REFUSED,
    UNUSABLE_FORM,
    AdapterRoom,
    Engine,
    EngineDeadError,
    Piece,
)
from serve_apps.engines.tensors import Shapes, check_tensors, load_tensors, stored_shapes
from serve_apps.engines.vllm.settings import LOGGING, engine_arguments, engine_environment
from stores.traces.conventions import allowed_tokens
from stores.traces.grammars import stated
from stores.types import FinishReason, GenerateRequest, ModelVersionRef

GRAMMAR_FAILED = "error"
"""The finish reason by which vLLM says that it takes a form but can make no grammar of it."""
SLEEP_LEVEL = 1
"""Keeps the weights in the host's memory, so that the engine serves the version that it says, whatever became of the training. Level 2
would drop them: an engine whose training failed would have to load its old version from the disk before its first token."""


class VllmEngine(Engine):
    """The engine over one `AsyncLLM`, vLLM's own process."""

    def __init__(self, settings: ServeConfig, folder: Path, *, version: int, room: AdapterRoom | None = None) -> None:
        """Starts the engine; see `Engine`."""
        from vllm.config.logging import LoggingConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        levels = LoggingConfig(configure_logging=True, pylogging_config_file=str(LOGGING))
        arguments = {"logging_config": levels, **engine_arguments(settings, folder, room)}
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self.max_model_len = self._llm.model_config.max_model_len
        self._folder, self._version, self._has_adapters = folder, version, room is not None
        self._stop_token_ids = stop_token_ids(folder)
        self._adapters: dict[str, tuple[Any, int]] = {}
        """By model group, vLLM's request for its adapter, and the version."""
        self._shapes: dict[str, Shapes] = {}
        self._lora_ids = count(1)
        self._num_probes = count()

    @classmethod
    def environment(cls, settings: ServeConfig, *, threads: int) -> dict[str, str]:
        """See `engine_environment`, which says why each is needed."""
        return engine_environment(settings, threads=threads)

    async def begin(self) -> None:
        """Tells the engine which version and tensors it was started with."""
        await self._llm.update_weight_version(str(self._version))
        await self._llm.collective_rpc("troupe_expect", args=(str(self._folder),))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece]:
        """Yields the completion; see `Engine`. How vLLM refuses a single request becomes a piece."""
        from vllm.exceptions import VLLMClientError

        adapter, version = self._adapters.get(request.model_group, (None, self._version))
        try:
            params = sampling_params(request, self._stop_token_ids)
            with _deaths():
                async for output in self._outputs(request.prompt_token_ids, params, adapter, request.request_id):
                    piece = _piece(request, output, version, has_adapter=adapter is not None)
                    version = piece.policy_version
                    yield piece
                    if piece.error:
                        return
        except (ValueError, VLLMClientError) as error:
            yield Piece(finish_reason=REFUSED, error=str(error))

    def progress(self) -> Mapping[str, int]:
        """Returns the tokens of requests under way; see `Engine`."""
        from serve_apps.engines.vllm.inside import tokens_under_way

        return tokens_under_way(self._llm)

    async def probe(self, sequences: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[list[float]]]:
        """Computes all sequences as one batch; see `Engine`."""
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

        async def logprobs(group: str, token_ids: Sequence[int]) -> list[float]:
            adapter, _ = self._adapters.get(group, (None, NO_VERSION))
            with _deaths():
                async for output in self._outputs(
                    token_ids, params.clone(), adapter, f"probe-{next(self._num_probes)}"
                ):
                    final = output
            return _prompt_logprobs(final)

        pairs = [(group, token_ids) for group, of_group in sequences.items() for token_ids in of_group]
        rows = await asyncio.gather(*(logprobs(group, token_ids) for group, token_ids in pairs))
        return {group: [row for (of, _), row in zip(pairs, rows, strict=True) if of == group] for group in sequences}

    async def load(self, ref: ModelVersionRef, folder: Path) -> None:
        """Takes a version of the model, or of a group's adapter where there are adapters; see `Engine`."""
        if self._has_adapters:
            await self._load_adapter(ref, folder)
            return
        await self._from_worker(self._llm.collective_rpc("troupe_stage", args=(str(folder),)))
        with _deaths():
            await self._llm.pause_generation(mode="keep", clear_cache=True)
            await self._llm.collective_rpc("troupe_swap")
            await self._llm.update_weight_version(str(ref.version))
            self._version = ref.version  # before generation goes on: the next token is of this version
            await self._llm.resume_generation()

    async def _load_adapter(self, ref: ModelVersionRef, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        group = ref.model_group
        shapes = self._shapes.get(group) or stored_shapes(folder)
        await asyncio.to_thread(lambda: check_tensors(load_tensors(folder), shapes, str(folder)))
        name = f"{group}@{ref.version}/{ref.manifest_sha256[:8]}"
        adapter = LoRARequest(lora_name=name, lora_int_id=next(self._lora_ids), lora_path=str(folder))
        try:
            is_loaded = await self._from_worker(self._llm.add_lora(adapter))
        except ValueError:
            await self._llm.remove_lora(adapter.lora_int_id)
            raise
        if not is_loaded:
            raise ValueError(f"the engine did not load {name} from {folder}")
        replaced = self._adapters.get(group)
        self._adapters[group], self._shapes[group] = (adapter, ref.version), shapes
        if replaced is not None:  # the engine loads it once more for requests that are still under way with it
            with _deaths():
                await self._llm.remove_lora(replaced[0].lora_int_id)

    async def sleep(self) -> None:
        """Freezes requests under way, keeps the weights in the host's memory and drops the KV cache."""
        with _deaths():
            await self._llm.sleep(level=SLEEP_LEVEL, mode="keep")

    async def wake(self) -> None:
        """See `Engine`; vLLM does it."""
        with _deaths():
            await self._llm.wake_up()

    async def free_bytes(self) -> list[int]:
        """Returns what each worker has free, in bytes."""
        with _deaths():
            free: list[int] = await self._llm.collective_rpc("troupe_free_bytes")
        return free

    async def health(self) -> None:
        """See `Engine`; vLLM does it."""
        with _deaths():
            await self._llm.check_health()

    def close(self) -> None:
        """Ends the process of the engine core."""
        self._llm.shutdown()

    def _outputs(
        self, prompt_token_ids: Sequence[int], params: Any, adapter: Any, request_id: str
    ) -> AsyncGenerator[Any]:
        tokens: Any = {"type": "token", "prompt_token_ids": list(prompt_token_ids)}
        outputs: AsyncGenerator[Any] = self._llm.generate(tokens, params, request_id, lora_request=adapter)
        return outputs

    async def _from_worker(self, call: Any) -> Any:
        """Awaits a call of the workers; ValueError with the worker's message where one refuses."""
        try:
            with _deaths():
                return await call
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001  vLLM turns every worker's exception into a plain Exception
            raise ValueError(str(error)) from None


def sampling_params(request: GenerateRequest, stop_token_ids: Sequence[int]) -> Any:
    """Returns the `SamplingParams` of a request. Args: stop_token_ids: what ends a completion unless `ignore_eos` is set."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    settings = {name: value for name, value in asdict(request.sampling).items() if name != "constraint"}
    settings |= request.settings
    constraint = request.sampling.constraint
    allowed = allowed_tokens(constraint)
    if allowed:
        settings["allowed_token_ids"] = allowed
    elif constraint:
        form, _, never = stated(constraint)
        settings["structured_outputs"] = StructuredOutputsParams(**form)
        settings["logit_bias"] = {**(settings.get("logit_bias") or {}), **dict.fromkeys(never, -math.inf)}
    ends = [] if settings.get("ignore_eos") else stop_token_ids
    return SamplingParams(
        seed=request.seed,
        logprobs=max(request.top_logprobs, len(allowed)),
        flat_logprobs=True,
        detokenize=False,
        stop_token_ids=[*ends, *settings.pop("stop_token_ids", ())],
        output_kind=RequestOutputKind.DELTA if request.is_streamed else RequestOutputKind.FINAL_ONLY,
        **settings,
    )


@contextmanager
def _deaths() -> Iterator[None]:
    """Turns vLLM's error of an engine that is gone into the port's."""
    from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

    try:
        yield
    except VllmEngineDeadError as error:
        raise EngineDeadError(str(error)) from error


def _piece(request: GenerateRequest, output: Any, version: int, *, has_adapter: bool) -> Piece:
    """Returns what is new in an output of vLLM. Args: version: which sampled it where vLLM does not say."""
    completion = output.outputs[0]
    reason = completion.finish_reason or ("" if request.is_streamed else FinishReason.ABORT.value)
    if request.sampling.constraint and reason == GRAMMAR_FAILED:
        return Piece(finish_reason=REFUSED, policy_version=version, error=UNUSABLE_FORM)
    allowed = allowed_tokens(request.sampling.constraint)
    flat, num_top = completion.logprobs, max(request.top_logprobs, len(allowed))
    own, top = _position_logprobs(flat, completion.token_ids, num_top) if flat is not None else ([], [])
    # With an adapter the spans are the base's, and a request ends with the version that it began with.
    spans = () if has_adapter else completion.weight_versions or ()
    return Piece(
        token_ids=list(completion.token_ids),
        logprobs=own,
        finish_reason=reason,
        policy_version=int(spans[-1].version) if spans else version,
        top_logprobs=[dict(list(of.items())[: request.top_logprobs]) for of in top] if request.top_logprobs else [],
        is_version_mixed=len(spans) > 1,
        num_cached_tokens=output.num_cached_tokens,
        # Where a filter leaves a token out, vLLM may tell any other token of probability 0 in its place.
        allowed_logprobs=[top[0].get(token, -math.inf) for token in allowed] if top else (),
    )


def _position_logprobs(flat: Any, token_ids: Sequence[int], num_top: int) -> tuple[list[float], list[dict[int, float]]]:
    """Returns the logprob of each token, and the `num_top` most likely tokens at its position, the likeliest first."""
    if not num_top:
        return list(flat.logprobs), []
    own, top = [], []
    for position, token in enumerate(token_ids):
        start, end = flat.start_indices[position], flat.end_indices[position]
        logprob_of = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        own.append(logprob_of[token])
        top.append(dict(sorted(logprob_of.items(), key=lambda item: -item[1])[:num_top]))
    return own, top


def _prompt_logprobs(output: Any) -> list[float]:
    """Returns the logprobs of the prompt's own tokens after the first, which has none."""
    flat, token_ids = output.prompt_logprobs, output.prompt_token_ids
    values = []
    for position in range(1, len(token_ids)):
        start, end = flat.start_indices[position], flat.end_indices[position]
        values.append(flat.logprobs[flat.token_ids.index(token_ids[position], start, end)])
    return values
