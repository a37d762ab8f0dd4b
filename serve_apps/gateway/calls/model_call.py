"""model_call: one request in tokens and the team that answers it -> its choices, piece by piece as they are sampled."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from serve_apps.chat.text_stream import TextStream
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.engines.port import NO_VERSION, Piece
from serve_apps.gateway.traffic.teams import ServedTeam
from serve_apps.openai_api.protocol import ApiError, usage_body
from serve_apps.openai_api.sampling_fields import SamplingFields
from serve_apps.policy.policy_stream import PolicyStreams
from serve_apps.spans import process_spans
from stores.types import GenerateRequest, Sampling

MAX_LOGPROBS = 200_000
"""Logprobs of a reply: each is an object of its own."""
ENDS = ("stop", "length")
"""Finish reasons of a whole completion; an engine that aborts one says another."""
MAX_NAMES, MAX_NAME = 32, 64
"""How many names a header has, and the characters of each."""


@dataclass(kw_only=True)
class Choice:
    """One completion of a request, complete or still growing."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    finish_reason: str = ""
    """One of `ENDS`, as sampled; empty while it grows. Tool calls are found in the text later."""
    stop: str | None = None
    """The stop string before which it ended; None where it ended otherwise."""
    policy_version: int = NO_VERSION
    is_version_mixed: bool = False
    """True if the weights changed while it was sampled."""


@dataclass(frozen=True, kw_only=True)
class ChoicePiece:
    """The newest part of one choice."""

    choice: Choice
    text: str
    delta: Piece | None
    """None for the last piece, which only has text that was held back."""


@dataclass(kw_only=True)
class ModelCall:
    """One request, tokenized and ready to be sampled."""

    operation: ClassVar[str] = "text_completion"
    """What spans call it."""
    request: SamplingFields
    team: ServedTeam
    model_group: str
    agent: str | None = None
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    settings: Mapping[str, Any]
    """What changes the sampling beside `sampling`: see `GenerateRequest.settings`."""
    top_logprobs: int = 0
    """How many of the most likely tokens are named at each position."""
    ignored: Sequence[str] = ()
    """What the request says and nobody reads."""
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    choices: dict[int, Choice] = field(default_factory=dict)
    """By index, as far as they have been sampled."""
    seeds: list[int] = field(init=False)
    """One per choice; they follow from the request's seed where it has one."""

    def __post_init__(self) -> None:
        first = self.request.seed if self.request.seed is not None else secrets.randbits(31)
        self.seeds = [(first + i) % 2**31 for i in range(self.request.n)]

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of the reply. `x-troupe-ignored` names what the request says and nobody reads."""
        names = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_NAME]) for name in self.ignored[:MAX_NAMES]]
        return self.team.headers(self.id) | ({"x-troupe-ignored": ", ".join(names)} if names else {})

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the model group."""
        return self.team.acting.tokenizers[self.model_group]

    @property
    def is_complete(self) -> bool:
        """Whether every choice was sampled to its end."""
        return len(self.choices) == self.request.n and all(
            choice.finish_reason in ENDS for choice in self.choices.values()
        )

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens of prompt and completions, as far as they have been sampled."""
        return usage_body(len(self.prompt_token_ids), sum(len(choice.token_ids) for choice in self.choices.values()))


def room_for_completion(limit: int | None, num_prompt: int, context: int) -> int:
    """Returns the number of tokens that are left for a completion; ApiError 400 where that is less than asked for.

    The errors begin as OpenAI's do: clients look for these words to shorten a prompt and ask again.
    """
    room = context - num_prompt
    begin = f"This model's maximum context length is {context} tokens. However, the prompt has {num_prompt} tokens"
    if room < 1:
        raise ApiError(400, f"{begin}: shorten it", code="context_length_exceeded", param="messages")
    if limit is not None and limit > room:
        raise ApiError(
            400,
            f"{begin} and max_tokens is {limit}: ask for at most {room}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return room


def check_length(prompt: str, tokenizer: ChatTokenizer, context: int) -> None:
    """Raises ApiError 400 for a prompt of so many characters that its tokens need not be counted."""
    most = tokenizer.most_characters(context)
    if most is not None and len(prompt) > most:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, the prompt has {len(prompt)} characters, and no more "
            f"than {most} can fit",
            code="context_length_exceeded",
            param="messages",
        )


def check_logprobs(num_tokens: int, top_logprobs: int) -> None:
    """Raises ApiError 400 where a request for logprobs may get more of them than are told at once.

    Args: num_tokens: of all completions of the request together, at most.
    """
    num = num_tokens * (1 + top_logprobs)
    if num > MAX_LOGPROBS:
        raise ApiError(
            400,
            f"completions of {num_tokens} tokens with {top_logprobs} alternatives each have {num} logprobs, and at most {MAX_LOGPROBS} are "
            "told at once: lower n, max_tokens or top_logprobs",
            code="invalid_value",
            param="top_logprobs",
        )


def sample_choices(call: ModelCall, streams: PolicyStreams) -> AsyncGenerator[ChoicePiece]:
    """Yields the pieces of all choices as they come. Closing the iterator ends the sampling of all choices."""
    return process_spans().model_call(call, _sampled(call, streams))


async def _sampled(call: ModelCall, streams: PolicyStreams) -> AsyncGenerator[ChoicePiece]:
    pieces: asyncio.Queue[ChoicePiece | None] = asyncio.Queue()
    tasks = [
        asyncio.ensure_future(_sample_choice(call, Choice(index=i), seed, streams, pieces))
        for i, seed in enumerate(call.seeds)
    ]
    for task in tasks:
        task.add_done_callback(
            lambda _: pieces.put_nowait(None)
        )  # so that the loop below also wakes when a choice ends
    try:
        num_left = len(tasks)
        while num_left:
            piece = await pieces.get()
            if piece is not None:
                yield piece
                continue
            num_left -= 1
            for task in tasks:
                if task.done():
                    task.result()  # raises the error that ended it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sample_choice(
    call: ModelCall, choice: Choice, seed: int, streams: PolicyStreams, pieces: asyncio.Queue[ChoicePiece | None]
) -> None:
    text_stream = TextStream(call.tokenizer, call.request.stops)
    request = GenerateRequest(
        request_id=call.id,
        model_group=call.model_group,
        prompt_token_ids=call.prompt_token_ids,
        sampling=call.sampling,
        seed=seed,
        top_logprobs=call.top_logprobs,
        settings=call.settings,
        is_streamed=call.request.stream or bool(call.request.stops),
    )
    async with aclosing(streams.stream(call.team.apps[call.model_group], request)) as deltas:
        async for delta in deltas:
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
            choice.top_logprobs += delta.top_logprobs
            is_same = choice.policy_version in (NO_VERSION, delta.policy_version)
            choice.is_version_mixed |= delta.is_version_mixed or not is_same
            choice.policy_version = delta.policy_version
            text = text_stream.push(delta.token_ids)
            choice.text += text
            choice.finish_reason = "stop" if text_stream.is_stopped else delta.finish_reason
            pieces.put_nowait(ChoicePiece(choice=choice, text=text, delta=delta))
            if choice.finish_reason:
                break
    if choice.finish_reason not in ENDS:
        raise ApiError(503, "the engine aborted the request", code="engine_unavailable", retry_after_s=2)
    rest = text_stream.end()
    choice.text += rest
    choice.stop = text_stream.stop
    if text_stream.is_stopped:  # also one in what was held back, where the limit of tokens ended the sampling
        choice.finish_reason = "stop"
    pieces.put_nowait(ChoicePiece(choice=choice, text=rest, delta=None))
