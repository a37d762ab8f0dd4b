"""chat: a chat request and the team that answers it -> its choices, piece by piece as they are sampled.

messages --template--> prompt ids --policy app--> token ids --> text   (chat_reply: --> OpenAI's form)
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from serve_apps.gateway.policy_stream import Delta, PolicyStreams, SampleRequest
from serve_apps.gateway.teams import ServedTeam
from serve_apps.openai_api.protocol import ApiError, ChatRequest
from serve_apps.openai_api.tool_formats import OfferedTools
from serve_apps.text_stream import TextStream
from serve_apps.tokenizer import ChatTokenizer
from stores.types import Sampling


@dataclass(kw_only=True)
class Choice:
    """One completion of a request, complete or still growing."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` or `length`, as sampled; empty while it grows. Tool calls are found in the text later."""
    policy_version: int = -1


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The newest part of one choice."""

    choice: Choice
    text: str
    delta: Delta | None
    """None for the last piece, which only has text that was held back."""


@dataclass(kw_only=True)
class Chat:
    """One request, tokenized and ready to be sampled."""

    request: ChatRequest
    team: ServedTeam
    model_group: str
    agent: str | None
    prompt_token_ids: list[int]
    sampling: Sampling
    tools: OfferedTools
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    choices: dict[int, Choice] = field(default_factory=dict)
    """By index, as far as they have been sampled."""
    seeds: list[int] = field(init=False)
    """One per choice; they follow from the request's seed where it has one."""

    def __post_init__(self) -> None:
        first = self.request.seed if self.request.seed is not None else secrets.randbits(31)
        self.seeds = [(first + i) % 2**31 for i in range(self.request.n)]

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the model group."""
        return self.team.acting.tokenizers[self.model_group]


def prepare_chat(request: ChatRequest, team: ServedTeam, model_group: str, agent: str | None) -> Chat:
    """Tokenizes a request and settles how to sample it; ApiError 400 where it does not fit the model."""
    from jinja2 import TemplateError

    tokenizer = team.acting.tokenizers[model_group]
    tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
    has_calls = any(message.tool_calls or message.role == "tool" for message in request.messages)
    if (tools or has_calls) and not tokenizer.knows_tools:
        raise ApiError(
            400,
            f"the chat template of model {request.model!r} does not support tools",
            code="tools_unsupported",
            param="tools",
        )
    messages = [message.for_template() for message in request.messages]
    if agent is not None:
        messages = team.acting.workflow.agents[agent].introduced(messages)
    try:
        prompt = tokenizer.encode_chat(messages, tools=tools)
    except (TemplateError, TypeError) as error:
        raise ApiError(
            400,
            f"the chat template of model {request.model!r} refuses these messages: {error}",
            code="invalid_value",
            param="messages",
        ) from None
    context = team.acting.max_model_len[model_group]
    max_completion = context - len(prompt)
    if max_completion < 1:
        raise ApiError(
            400,
            f"these messages have {len(prompt)} tokens, and the context of model {request.model!r} holds {context}: shorten "
            "them",
            code="context_length_exceeded",
            param="messages",
        )
    if request.limit is not None and request.limit > max_completion:
        raise ApiError(
            400,
            f"these messages have {len(prompt)} tokens and max_tokens is {request.limit}, together more than the {context} of "
            f"model {request.model!r}: ask for at most {max_completion}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    default = team.acting.sampling[agent] if agent is not None else Sampling(max_tokens=max_completion, temperature=1.0)
    sampling = replace(
        default,
        max_tokens=request.limit or min(default.max_tokens, max_completion),
        temperature=default.temperature if request.temperature is None else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
    )
    return Chat(
        request=request,
        team=team,
        model_group=model_group,
        agent=agent,
        prompt_token_ids=prompt,
        sampling=sampling,
        tools=OfferedTools(tokenizer=tokenizer, tools=tools),
    )


async def sample_choices(chat: Chat, streams: PolicyStreams) -> AsyncGenerator[Piece]:
    """Yields the pieces of all choices as they come. Closing the iterator ends the sampling of all choices."""
    pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
    tasks = [
        asyncio.ensure_future(_sample_choice(chat, Choice(index=i), seed, streams, pieces))
        for i, seed in enumerate(chat.seeds)
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
    chat: Chat, choice: Choice, seed: int, streams: PolicyStreams, pieces: asyncio.Queue[Piece | None]
) -> None:
    text_stream = TextStream(chat.tokenizer, chat.request.stops)
    penalties = {
        name: value
        for name in ("presence_penalty", "frequency_penalty")
        if (value := getattr(chat.request, name)) != 0.0
    }
    request = SampleRequest(
        model_group=chat.model_group,
        prompt_token_ids=chat.prompt_token_ids,
        sampling=chat.sampling,
        seed=seed,
        top_logprobs=chat.request.top_logprobs,
        penalties=penalties,
        is_whole=not (chat.request.stream or chat.request.stops),
    )
    async with aclosing(streams.stream(chat.team.apps[chat.model_group], request)) as deltas:
        async for delta in deltas:
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
            choice.top_logprobs += delta.top_logprobs
            choice.policy_version = delta.policy_version
            text = text_stream.push(delta.token_ids)
            choice.text += text
            choice.finish_reason = "stop" if text_stream.is_stopped else delta.finish_reason
            pieces.put_nowait(Piece(choice=choice, text=text, delta=delta))
            if choice.finish_reason:
                break
    if choice.finish_reason not in ("stop", "length"):
        raise ApiError(503, "the engine aborted the request", code="engine_unavailable", retry_after_s=2)
    rest = text_stream.end()
    choice.text += rest
    pieces.put_nowait(Piece(choice=choice, text=rest, delta=None))
