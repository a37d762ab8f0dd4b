"""episode: the calls of one program -> turns of its episode, and answers in OpenAI's form.

What a program asks for is what it gets, but for the sampling: temperature and seed are the run's, for the turn is trained on
or judged, and `max_tokens` is the less of both.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from serve_apps.client import ContextExhausted, PolicyCallError
from serve_apps.contracts import Parsed
from serve_apps.program.conversations import Conversations
from serve_apps.runner import Prompt, Recorder
from serve_apps.service.protocol import ApiError, Body, ChatRequest
from serve_apps.tool_calls import OPEN, assistant_message
from stores.types import FinishReason, Turn


class PostedOutcome(Body):
    """`POST /v1/episodes/{episode_id}/outcome`: how it ended, by the program or a grader."""

    answer: str | None = None
    score: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    """0 to 1; the credit rule `posted_score` pays it."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """JSON values for other credit rules and for readers."""


@dataclass
class _Asked:
    """A tool call that the program has not answered yet."""

    tool: str
    arguments: str
    turn_index: int
    answered_at: float


@dataclass(kw_only=True)
class ProgramEpisode:
    """One episode that a program plays."""

    recorder: Recorder
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """The API key that its calls bring along."""
    outcome: PostedOutcome | None = None
    exhausted: ContextExhausted | None = None
    """A prompt that did not fit: the program was told."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BaseException | None = None
    """What ends the episode whatever the program does: the engines or we ourselves failed, not the program."""
    _conversations: dict[str, Conversations] = field(default_factory=dict)
    _asked: dict[str, _Asked] = field(default_factory=dict)

    @property
    def agents(self) -> list[str]:
        """Names that a program may call."""
        return list(self.recorder.team.group_of)

    @property
    def growth(self) -> dict[str, dict[str, int]]:
        """By agent, how many calls were new, grown or broken."""
        return {name: {**of.counts} for name, of in self._conversations.items()}

    def agent_of(self, path: str | None, model: str) -> str:
        """The agent that a path names, or else the model; where there is one agent every model name means it."""
        agents = self.agents
        name = path if path is not None else agents[0] if len(agents) == 1 else model
        if name in agents:
            return name
        raise ApiError(
            404,
            f"there is no agent {name!r} in this episode; agents are {', '.join(agents)}",
            code="agent_not_found",
            param="model" if path is None else None,
        )

    async def chat(self, agent: str, request: ChatRequest) -> dict[str, Any]:
        """The answer to one call, recorded as a turn; raises ApiError, and ends the episode with any other error."""
        try:
            return await self._chat(agent, request)
        except ApiError:
            raise
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """Ends the episode with this error, which is not the program's."""
        self.failure = error
        self.failed.set()

    async def _chat(self, agent: str, request: ChatRequest) -> dict[str, Any]:
        if request.n > 1:
            raise ApiError(400, "an episode has one choice per call: ask n times", code="unsupported_value", param="n")
        if request.top_logprobs:
            raise ApiError(
                400, "top_logprobs are not kept in an episode", code="unsupported_value", param="top_logprobs"
            )
        team = self.recorder.team
        tokenizer = team.tokenizers[team.group_of[agent]]
        tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
        messages = [message.for_template() for message in request.messages]
        results = self._note_tool_answers(agent, request)
        conversations = self._conversations.setdefault(agent, Conversations(tokenizer))
        prompt = _made(lambda: conversations.prompt(messages, tools=tools))
        names = {tool.function.name for tool in request.offered_tools}
        prefix = f"call_{secrets.token_hex(6)}"
        turn, parsed = await self._turn(
            agent,
            Prompt(
                text=prompt.text,
                token_ids=prompt.token_ids,
                inputs={
                    "messages": json.dumps(messages),
                    **{f"message {i}": str(m["content"]) for i, m in enumerate(messages)},
                },
                parents=results if prompt.continues is None else (prompt.continues, *results),
            ),
            request,
            names,
            prefix,
        )
        message = dict(parsed.data)
        conversations.add(messages, prompt, turn.completion_token_ids, answered=message, turn_index=turn.turn_index)
        now = time.perf_counter()
        for call in message.get("tool_calls", ()):
            of = call["function"]
            self._asked[call["id"]] = _Asked(of["name"], of["arguments"], turn.turn_index, now)
        return self._body(agent, request, turn, message)

    async def _turn(
        self, agent: str, prompt: Prompt, request: ChatRequest, names: set[str], prefix: str
    ) -> tuple[Turn, Parsed]:
        def parse(text: str) -> Parsed:
            shown = _until(text, request.stops)
            message = assistant_message(shown, names, id_prefix=prefix)
            is_unreadable = bool(names) and OPEN in (message["content"] or "")
            return Parsed(fields={}, fault="a tool call that is none" if is_unreadable else "", data=message)

        try:
            return await self.recorder.turn(agent, prompt, parse=parse, max_tokens=request.limit, stops=request.stops)
        except ContextExhausted as error:
            self.exhausted = error
            raise ApiError(400, str(error), code="context_length_exceeded", param="messages") from None
        except (TimeoutError, PolicyCallError) as error:
            self._fail(error)
            raise ApiError(503, str(error), code="engine_unavailable") from None

    def _note_tool_answers(self, agent: str, request: ChatRequest) -> tuple[int, ...]:
        """Records the tool calls that these messages answer, once each; returns their places among the events."""
        found = []
        for message in request.messages:
            asked = self._asked.pop(message.tool_call_id or "", None)
            if message.role == "tool" and asked is not None:
                place = self.recorder.used(
                    asked.tool,
                    caller=agent,
                    turn=asked.turn_index,
                    request=json.loads(asked.arguments),
                    response=str(message.for_template()["content"]),
                    began=asked.answered_at,
                )
                found.append(place)
        return tuple(found)

    def _body(self, agent: str, request: ChatRequest, turn: Turn, message: Mapping[str, Any]) -> dict[str, Any]:
        reason = "length" if turn.finish_reason is FinishReason.LENGTH else "stop"
        if reason == "stop" and "tool_calls" in message:
            reason = "tool_calls"
        logprobs = None
        if request.logprobs:
            tokenizer = self.recorder.team.tokenizers[turn.model_group]
            texts = [tokenizer.token_text(token) for token in turn.completion_token_ids]
            places = [
                {"token": text, "logprob": max(float(value), -9999.0), "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, turn.rollout_logprobs, strict=True)
            ]
            logprobs = {"content": places, "refusal": None}
        num_prompt, num_completion = len(turn.prompt_token_ids), len(turn.completion_token_ids)
        return {
            "id": f"chatcmpl-{self.recorder.spec.episode_id}-{turn.turn_index}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": f"{turn.model_group}@{turn.policy_version}",
            "choices": [{"index": 0, "message": dict(message), "finish_reason": reason, "logprobs": logprobs}],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_completion,
                "total_tokens": num_prompt + num_completion,
            },
            "troupe": {"agent": agent, "turn": turn.turn_index, "temperature": turn.sampling.temperature},
        }


def _made(make: Any) -> Any:
    """What `make` gives; ApiError where the chat template refuses the messages."""
    from jinja2 import TemplateError

    try:
        return make()
    except (TemplateError, TypeError) as error:
        raise ApiError(
            400, f"the chat template refuses these messages: {error}", code="invalid_value", param="messages"
        ) from None


def _until(text: str, stops: list[str]) -> str:
    """What stands before the first stop text."""
    return text[: min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=len(text))]


def as_chunks(body: Mapping[str, Any], *, with_usage: bool) -> list[dict[str, Any]]:
    """A whole answer as the chunks of `stream: true`: a turn is recorded whole, and streamed when it is."""
    (choice,) = body["choices"]
    message = choice["message"]
    envelope = {k: v for k, v in body.items() if k not in ("choices", "usage", "object")}
    envelope["object"] = "chat.completion.chunk"
    parts: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"] or ""}]
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
