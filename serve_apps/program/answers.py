"""answers: a turn of a program's episode -> a chat completion in OpenAI's form, whole or as chunks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from serve_apps.openai_api.answer_reader import REASONING_KEYS, AnswerReader
from serve_apps.openai_api.chat_request import ChatRequest
from stores.types import FinishReason, Turn


def answer_body(
    episode_id: str, request: ChatRequest, turn: Turn, message: Mapping[str, Any], reader: AnswerReader
) -> dict[str, Any]:
    """Returns the chat completion that answers a request. Args: message: the assistant's message of the turn."""
    tokenizer = reader.tools.tokenizer
    reason = "length" if turn.finish_reason is FinishReason.LENGTH else "stop"
    if reason == "stop" and "tool_calls" in message:
        reason = "tool_calls"
    logprobs = None
    if request.logprobs:
        texts = [tokenizer.token_text(token) for token in turn.completion_token_ids]
        contents = [
            {"token": text, "logprob": max(float(value), -9999.0), "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, turn.rollout_logprobs, strict=True)
        ]
        logprobs = {"content": contents, "refusal": None}
    num_prompt, num_completion = len(turn.prompt_token_ids), len(turn.completion_token_ids)
    return {
        "id": f"chatcmpl-{episode_id}-{turn.turn_index}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"{turn.model_group}@{turn.policy_version}",
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason, "logprobs": logprobs}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            **reader.usage([turn.completion_token_ids]),
        },
        "troupe": {"agent": turn.agent, "turn": turn.turn_index, "temperature": turn.sampling.temperature},
    }


def as_chunks(body: Mapping[str, Any], *, with_usage: bool) -> list[dict[str, Any]]:
    """Returns a whole answer as the chunks of `stream: true`: a turn is recorded first and streamed afterwards."""
    (choice,) = body["choices"]
    message = choice["message"]
    envelope = {k: v for k, v in body.items() if k not in ("choices", "usage", "object")}
    envelope["object"] = "chat.completion.chunk"
    thoughts = {key: message[key] for key in REASONING_KEYS if key in message}
    parts: list[dict[str, Any]] = [{"role": "assistant", **thoughts, "content": message["content"] or ""}]
    if calls := message.get("tool_calls"):
        parts.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
    chunks = [
        {**envelope, "choices": [{"index": 0, "delta": part, "finish_reason": None, "logprobs": None}]}
        for part in parts
    ]
    chunks[0]["choices"][0]["logprobs"] = choice["logprobs"]
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    chunks.append({**envelope, "choices": [last]})
    if with_usage:
        chunks.append({**envelope, "choices": [], "usage": body["usage"]})
    return chunks
