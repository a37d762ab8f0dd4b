"""chat: a chat request and the team that answers it -> its choices, piece by piece as they are sampled.

messages --template--> prompt ids --policy app--> token ids --> text   (chat_reply: --> OpenAI's form)
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from serve_apps.gateway.policy_stream import Delta, PolicyStreams, SampleRequest
from serve_apps.gateway.teams import ServedTeam
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.constraints import constraint_of, is_constrained, thoughts_of
from serve_apps.openai_api.protocol import ApiError
from serve_apps.openai_api.tool_formats import OfferedTools, load_parsers
from serve_apps.policy.wire import STRUCTURED_OUTPUTS
from serve_apps.text_stream import TextStream
from serve_apps.tokenizer import ChatTokenizer, PromptSettings
from stores.types import Sampling

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
    settings: Mapping[str, Any]
    """What changes the sampling beside `sampling`: arguments of vLLM's `SamplingParams`."""
    ignored: Sequence[str] = ()
    """What the request says and nobody reads."""
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
    def headers(self) -> dict[str, str]:
        """The HTTP headers of the reply. `x-troupe-ignored` names what the request says and nobody reads."""
        names = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_NAME]) for name in self.ignored[:MAX_NAMES]]
        return self.team.headers(self.id) | ({"x-troupe-ignored": ", ".join(names)} if names else {})

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer of the model group."""
        return self.team.acting.tokenizers[self.model_group]


async def prepare_chat(request: ChatRequest, team: ServedTeam, model_group: str, agent: str | None) -> Chat:
    """Tokenizes a request and settles how to sample it; ApiError 400 where it does not fit the model."""
    from jinja2 import TemplateError

    tokenizer = team.acting.tokenizers[model_group]
    has_calls = any(message.tool_calls or message.role == "tool" for message in request.messages)
    if (request.tools or has_calls) and not tokenizer.knows_tools:
        raise ApiError(
            400,
            f"the chat template of model {request.model!r} does not support tools",
            code="tools_unsupported",
            param="tools",
        )
    messages = [message.for_template() for message in request.messages]
    if agent is not None:
        messages = team.acting.workflow.agents[agent].introduced(messages)
    variables = tokenizer.known_variables(request.template_variables)
    settings = PromptSettings(
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=variables,
    )
    try:
        marked = tokenizer.mark_chat(messages, tools=request.shown_tools, settings=settings)
    except (TemplateError, TypeError, ValueError) as error:
        raise ApiError(
            400,
            f"the chat template of model {request.model!r} refuses these messages: {error}",
            code="invalid_value",
            param="messages",
        ) from None
    prompt = tokenizer.encode_marked(marked)
    max_completion = room_for_completion(request, len(prompt), team.acting.max_model_len[model_group])
    default = team.acting.sampling[agent] if agent is not None else Sampling(max_tokens=max_completion, temperature=1.0)
    sampling = replace(
        default,
        max_tokens=request.limit or min(default.max_tokens, max_completion),
        temperature=default.temperature if request.temperature is None else request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
    )
    tools = OfferedTools(tokenizer=tokenizer, tools=request.callable_tools, is_single=not request.parallel_tool_calls)
    if tools.needs_vllm or (tools.tools and is_constrained(request)):
        await asyncio.to_thread(load_parsers)
    constraint = constraint_of(request, tools, thoughts_of(marked, tokenizer.chat_template))
    return Chat(
        request=request,
        team=team,
        model_group=model_group,
        agent=agent,
        prompt_token_ids=prompt,
        sampling=sampling,
        tools=tools,
        settings={**request.engine_settings, **({STRUCTURED_OUTPUTS: constraint} if constraint else {})},
        ignored=[*request.dropped, *sorted(request.template_variables.keys() - variables.keys())],
    )


def room_for_completion(request: ChatRequest, num_prompt: int, context: int) -> int:
    """Returns the number of tokens that are left for a completion; ApiError 400 where that is less than asked for.

    The errors begin as OpenAI's do: clients look for these words to shorten a chat and ask again.
    """
    room = context - num_prompt
    begin = f"This model's maximum context length is {context} tokens. However, these messages have {num_prompt} tokens"
    if room < 1:
        raise ApiError(400, f"{begin}: shorten the messages", code="context_length_exceeded", param="messages")
    if request.limit is not None and request.limit > room:
        raise ApiError(
            400,
            f"{begin} and max_tokens is {request.limit}: ask for at most {room}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return room


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
    request = SampleRequest(
        model_group=chat.model_group,
        prompt_token_ids=chat.prompt_token_ids,
        sampling=chat.sampling,
        seed=seed,
        top_logprobs=chat.request.top_logprobs,
        settings=chat.settings,
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
