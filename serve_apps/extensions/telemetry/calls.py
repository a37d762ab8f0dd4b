"""calls: a model call of a caller -> the pieces of its choices, inside a span."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from opentelemetry.trace import Tracer

from serve_apps.extensions.telemetry import names
from serve_apps.extensions.telemetry.spans import Attributes, messages, open_span
from serve_apps.gateway.calls.model_call import ChoicePiece, ModelCall

SHOWN_TOKENS = 4096
"""Of a longer prompt only the last tokens are decoded for a span."""


async def in_span(
    tracer: Tracer, call: ModelCall, pieces: AsyncGenerator[ChoicePiece], *, texts: bool
) -> AsyncGenerator[ChoicePiece]:
    """Yields the pieces of a call inside its span. Args: texts: whether it holds texts, where the caller allows it."""
    asked = _asked(call)
    shows_texts = texts and getattr(call.request, "store", None) is not False
    began, has_begun = time.perf_counter(), False
    with open_span(
        tracer,
        f"{asked[names.OPERATION_NAME]} {asked[names.REQUEST_MODEL]}",
        asked,
        kind="client",
        is_current=False,
        with_messages=lambda: shows_texts,
        describe=partial(_answered, shows_texts=shows_texts),
    ) as span:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    if call.request.stream and not has_begun:
                        has_begun = True
                        first_s = time.perf_counter() - began
                        span.span.set_attribute(names.RESPONSE_TIME_TO_FIRST_CHUNK, first_s)
                    yield piece
        finally:
            span.record(call)


def _asked(call: ModelCall) -> dict[str, Any]:
    request, sampling = call.request, call.sampling
    attributes: dict[str, Any] = {
        names.OPERATION_NAME: call.operation,
        names.PROVIDER_NAME: names.PROVIDER,
        names.REQUEST_MODEL: request.model,
        names.REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.RESPONSE_ID: call.id,
        names.TEAM: call.team.name,
        names.TEAM_VERSION: call.team.version,
        names.ALIAS: call.team.alias,
        names.MODEL_GROUP: call.model_group,
    }
    if call.agent is not None:
        attributes[names.AGENT_NAME] = call.agent
    if sampling.top_k:
        attributes[names.REQUEST_TOP_K] = sampling.top_k
    if request.seed is not None:
        attributes[names.REQUEST_SEED] = request.seed
    if request.n != 1:
        attributes[names.REQUEST_CHOICE_COUNT] = request.n
    return attributes | ({names.REQUEST_STREAM: True} if request.stream else {})


def _answered(call: ModelCall, *, shows_texts: bool) -> Attributes:
    """Returns what a span says of a call that has ended, complete or not."""
    choices = [choice for _, choice in sorted(call.choices.items())]
    reasons = [choice.finish_reason or "error" for choice in choices]
    attributes: dict[str, Any] = {
        names.USAGE_INPUT_TOKENS: call.usage["prompt_tokens"],
        names.USAGE_OUTPUT_TOKENS: call.usage["completion_tokens"],
        names.RESPONSE_FINISH_REASONS: reasons,
    }
    if versions := {choice.policy_version for choice in choices if choice.policy_version >= 0}:
        attributes[names.POLICY_VERSION] = max(versions)
        attributes[names.RESPONSE_MODEL] = f"{call.model_group}@{max(versions)}"
    if shows_texts:
        prompt = call.tokenizer.decode(list(call.prompt_token_ids)[-SHOWN_TOKENS:])
        attributes[names.INPUT_MESSAGES] = messages("user", [prompt])
        attributes[names.OUTPUT_MESSAGES] = messages("assistant", [choice.text for choice in choices], reasons)
    return attributes
