"""generation: requests in tokens -> completions and probe logprobs of one vLLM engine. Imports of vLLM are late.

batch     many requests, results as they finish,     (collectors, evaluation)
          and every PULSE_S how far the others are
stream    one request, deltas as they are sampled    (the gateway)
probe     logprobs of given sequences                (the proof of a sync)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from serve_apps.policy.serving_state import Route, ServingState
from serve_apps.policy.wire import (
    CONTEXT,
    NO_VERSION,
    REFUSED,
    WireDelta,
    WireProgress,
    WireRequest,
    WireResult,
)
from stores.traces.conventions import allowed_tokens
from stores.types import FinishReason

FLUSH_S = 0.01
"""How long finished completions wait for others before they are sent back in one message."""
GRAMMAR_FAILED = "error"
"""The finish reason by which vLLM says that it takes a form but can make no grammar of it."""
UNUSABLE_FORM = "the engine can make no grammar of the form that is asked for: simplify it"
PULSE_S = 3.0
"""How often a batch is told how far it is, while the engine samples."""


class Routes(Protocol):
    """Tells which weights answer for a model group: `ServedWeights` or `ServedAdapters`."""

    states: dict[str, ServingState]
    """The state of every model group."""

    def route(self, model_group: str) -> Route | None:
        """Returns the route of a request; None while nothing is served for the group."""
        ...


class Generation:
    """Runs requests on one engine. Every method raises vLLM's EngineDeadError when the engine is gone."""

    def __init__(self, engine: Any, routes: Routes, *, stop_token_ids: Sequence[int]) -> None:
        """Starts nothing.

        Args:
            engine: an `AsyncLLM`.
            stop_token_ids: tokens that end a completion.
        """
        self._engine = engine
        self._routes = routes
        self._stop_token_ids = list(stop_token_ids)
        self._max_model_len: int = engine.model_config.max_model_len
        self._num_requests = 0
        self._looked_at = float("-inf")
        self._num_sampled, self._num_tokens = 0, dict[str, int]()

    async def batch(self, requests: Sequence[WireRequest]) -> AsyncGenerator[list[WireResult] | WireProgress]:
        """Yields results, several at a time, as completions finish, in no particular order.

        A request that does not fit into the context comes back as an error by itself. In between, every `PULSE_S` seconds,
        comes how far the others are, as long as the engine samples anything: requests wait their turn behind those of
        other batches, and their caller must be able to tell that from an engine that hangs.
        """
        finished: list[WireResult] = []
        pending: set[asyncio.Task[WireResult]] = set()
        key_of: dict[str, int] = {}
        seen, pulse_at = self._progress()[0], time.monotonic() + PULSE_S
        try:
            for request in requests:
                if excess := self._excess(request):
                    finished.append(_error_result(request, CONTEXT, excess))
                else:
                    key_of[request_id := self._next_id()] = request.key
                    pending.add(asyncio.ensure_future(self._complete(request, request_id)))
            while pending:
                timeout = max(0.0, pulse_at - time.monotonic())
                done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if time.monotonic() >= pulse_at:
                    pulse_at = time.monotonic() + PULSE_S
                    before, (seen, num_tokens) = seen, self._progress()
                    if seen != before:
                        yield WireProgress({key: num_tokens[i] for i, key in key_of.items() if i in num_tokens})
                if not done:
                    continue
                if pending:
                    late, pending = await asyncio.wait(pending, timeout=FLUSH_S)
                    done |= late
                finished.extend(task.result() for task in done)
                yield finished
                finished = []
            if finished:
                yield finished
        finally:
            for task in pending:
                task.cancel()

    async def stream(self, request: WireRequest, more: Mapping[str, Any]) -> AsyncGenerator[WireDelta]:
        """Yields one completion as it is sampled; closing the generator frees its slot in the engine.

        Args:
            more: `top_logprobs`, how many of the most likely tokens to name at each position; `is_whole`: one delta at the
                end; further arguments of vLLM's `SamplingParams`, which what is trained on never has.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        if excess := self._excess(request):
            yield WireDelta([], [], [], CONTEXT, NO_VERSION, excess)
            return
        route = self._routes.route(request.model_group)
        if route is None:
            yield WireDelta([], [], [], *self._why_nobody_answers(request))
            return
        version = route.version
        settings = dict(more)
        num_top = settings.pop("top_logprobs", 0)
        kind = RequestOutputKind.FINAL_ONLY if settings.pop("is_whole", False) else RequestOutputKind.DELTA
        try:
            params = self._params(request, kind=kind, logprobs=num_top, **settings)
            outputs = self._outputs(request.prompt_token_ids, params, route.lora_request, self._next_id())
            async for output in outputs:
                self._num_sampled += 1
                completion = output.outputs[0]
                spans = completion.weight_versions or ()
                version = int(spans[-1].version) if spans and route.lora_request is None else version
                flat = completion.logprobs
                own, top = _position_logprobs(flat, completion.token_ids, num_top) if flat is not None else ([], [])
                reason = completion.finish_reason or ""
                if request.constraint and reason == GRAMMAR_FAILED:
                    yield WireDelta([], [], [], REFUSED, version, UNUSABLE_FORM)
                    return
                yield WireDelta(list(completion.token_ids), own, top, reason, version, "")
        except (ValueError, VLLMClientError) as error:  # how vLLM refuses a single request
            yield WireDelta([], [], [], REFUSED, version, str(error))

    async def probe(self, sequences: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[list[float]]]:
        """Returns log p(seq[j+1] | seq[:j+1]) under the served weights, `len(seq) - 1` values for each sequence of each group.

        The prefix cache is not read: it may hold what an older version computed.
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
        # Of a group without an adapter these are the base's: its status, which comes along, says that nothing is live.
        routes = {group: self._routes.route(group) or Route(None, NO_VERSION) for group in sequences}
        pairs = [(group, token_ids) for group, of_group in sequences.items() for token_ids in of_group]
        outputs = await asyncio.gather(
            *(
                self._final_output(ids, params.clone(), routes[group].lora_request, self._next_id())
                for group, ids in pairs
            )
        )
        logprobs: dict[str, list[list[float]]] = {group: [] for group in sequences}
        for (group, _), output in zip(pairs, outputs, strict=True):
            logprobs[group].append(_prompt_logprobs(output))
        return logprobs

    def _progress(self) -> tuple[int, dict[str, int]]:
        """Returns a count that grows whenever the engine samples, and the number of tokens of every request under way.

        A request that the engine has not begun on is left out. Nothing is asked of the engine: vLLM keeps the tokens of
        unfinished requests in this process. Requests that come or are given up do not move the count: in an engine that
        hangs they would pass for progress.
        """
        now = time.monotonic()
        if now > self._looked_at + PULSE_S / 10:  # once for all batches
            states = list(self._engine.output_processor.request_states.values())
            begun = [state for state in states if not state.is_prefilling]
            before = self._num_tokens
            self._num_tokens = {state.external_req_id: state.detokenizer.num_output_tokens() for state in begun}
            self._num_sampled += sum(max(0, n - before.get(i, 0)) for i, n in self._num_tokens.items())
            self._looked_at = now
        return self._num_sampled, self._num_tokens

    async def _complete(self, request: WireRequest, request_id: str) -> WireResult:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        route = self._routes.route(request.model_group)
        if route is None:
            reason, _, message = self._why_nobody_answers(request)
            return _error_result(request, reason, message)
        try:
            allowed = allowed_tokens(request.constraint)
            params = self._params(request, kind=RequestOutputKind.FINAL_ONLY, logprobs=len(allowed))
            output = await self._final_output(request.prompt_token_ids, params, route.lora_request, request_id)
        except (ValueError, VLLMClientError) as error:  # how vLLM refuses a single request
            return _error_result(request, REFUSED, str(error))
        completion = output.outputs[0]
        if request.constraint and completion.finish_reason == GRAMMAR_FAILED:
            return _error_result(request, REFUSED, UNUSABLE_FORM)
        flat = completion.logprobs
        own, of_all = _position_logprobs(flat, completion.token_ids, len(allowed)) if flat is not None else ([], [])
        # With an adapter the spans are the base's, and a request ends with the version that it began with.
        spans = (completion.weight_versions or ()) if route.lora_request is None else ()
        return WireResult(
            key=request.key,
            token_ids=list(completion.token_ids),
            logprobs=own,
            finish_reason=completion.finish_reason or FinishReason.ABORT.value,
            policy_version=int(spans[-1].version) if spans else route.version,
            is_version_mixed=len(spans) > 1,
            error="",
            num_cached_tokens=output.num_cached_tokens or 0,
            allowed_logprobs=[of_all[0][token] for token in allowed] if of_all else (),
        )

    def _why_nobody_answers(self, request: WireRequest) -> tuple[str, int, str]:
        """Returns finish reason, version and message where nothing is served for a group.

        A group of this engine whose adapter could not be loaded may be answered by another replica, or later.
        """
        state = self._routes.states.get(request.model_group)
        if state is not None:
            why = state.error or "it is being loaded"
            return FinishReason.ABORT.value, NO_VERSION, f"no adapter of {request.model_group!r} is live: {why}"
        groups = ", ".join(self._routes.states)
        return REFUSED, NO_VERSION, f"no adapter of {request.model_group!r} is live; groups are {groups}"

    def _excess(self, request: WireRequest) -> str:
        """Returns why a request does not fit into the context; empty where it does."""
        num_prompt = len(request.prompt_token_ids)
        excess = num_prompt + request.max_tokens - self._max_model_len
        if excess <= 0:
            return ""
        return (
            f"prompt of {num_prompt} tokens + max_tokens {request.max_tokens} exceeds serve.max_model_len = "
            f"{self._max_model_len} by {excess}"
        )

    def _params(self, request: WireRequest, *, kind: Any, logprobs: int = 0, **more: Any) -> Any:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        ends = [] if more.get("ignore_eos") else self._stop_token_ids
        if allowed := allowed_tokens(request.constraint):
            more["allowed_token_ids"] = allowed
        elif request.constraint:
            form = {name: value for name, value in json.loads(request.constraint).items() if name != "end_ids"}
            more["structured_outputs"] = StructuredOutputsParams(**form)
        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=request.seed,
            logprobs=logprobs,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=[*ends, *more.pop("stop_token_ids", ())],
            output_kind=kind,
            **more,
        )

    def _next_id(self) -> str:
        """Returns the engine's name of the next request."""
        self._num_requests += 1
        return str(self._num_requests)

    def _outputs(
        self, prompt_token_ids: Sequence[int], params: Any, lora_request: Any, request_id: str
    ) -> AsyncGenerator[Any]:
        tokens: Any = {"type": "token", "prompt_token_ids": list(prompt_token_ids)}
        outputs: AsyncGenerator[Any] = self._engine.generate(tokens, params, request_id, lora_request=lora_request)
        return outputs

    async def _final_output(
        self, prompt_token_ids: Sequence[int], params: Any, lora_request: Any, request_id: str
    ) -> Any:
        """Returns the one output of a FINAL_ONLY request."""
        async for output in self._outputs(prompt_token_ids, params, lora_request, request_id):
            self._num_sampled += 1
            final = output
        return final


def _error_result(request: WireRequest, reason: str, message: str) -> WireResult:
    return WireResult(request.key, [], [], reason, NO_VERSION, False, message)


def _position_logprobs(flat: Any, token_ids: Sequence[int], num_top: int) -> tuple[list[float], list[dict[int, float]]]:
    """Returns the logprob of each token of a delta, and the `num_top` most likely tokens at its position."""
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
    flat = output.prompt_logprobs
    token_ids = output.prompt_token_ids
    values = []
    for position in range(1, len(token_ids)):
        start, end = flat.start_indices[position], flat.end_indices[position]
        values.append(flat.logprobs[flat.token_ids.index(token_ids[position], start, end)])
    return values
