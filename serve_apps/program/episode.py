"""episode: the calls of one program -> turns of its episode.

A program's requests are followed except for the sampling: temperature and seed are the run's, because the turn is trained on
or evaluated, and the smaller `max_tokens` counts.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from pydantic import Field

from serve_apps.authoring.contracts import Parsed
from serve_apps.authoring.workflow import SCORE, Outcome
from serve_apps.chat.long_texts import worked_on
from serve_apps.episode.recorder import Prompt, Recorder
from serve_apps.episode.runner import CONTEXT_EXHAUSTED
from serve_apps.openai_api.answer_reader import AnswerReader
from serve_apps.openai_api.chat_request import ChatRequest, refusals_of_template
from serve_apps.openai_api.constraints import OVERLOADED, prepared_constraint
from serve_apps.openai_api.protocol import ApiError, Metadata, RequestBody, usage_body
from serve_apps.policy.client import ContextExhausted, PolicyCallError, RequestRefused
from serve_apps.program.conversations import CONVERSATIONS, Conversations
from serve_apps.program.process import ProgramError
from stores.types import FinishReason, Turn

TURN_LIMIT = "turn_limit"
"""The stop reason of an episode whose program asked for more turns than it may have."""


FOREIGN_SAMPLING = ("logit_bias", "min_tokens", "stop_token_ids", "allowed_token_ids", "ignore_eos")
"""Settings of a call that change what can be sampled at all."""


class PostedOutcome(RequestBody):
    """Is the body of `POST /v1/episodes/{episode_id}/outcome`: how the episode ended, by the program or a grader."""

    answer: str | None = None
    score: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    """A score of 0 to 1; the credit rule `posted_score` pays it."""
    metadata: Metadata = Field(default_factory=dict)
    """JSON values for other credit rules and for readers; a `score` among them is held to 0 to 1 as well."""


@dataclass
class _Asked:
    """Holds a tool call that the program has not answered yet."""

    caller: str
    """The agent that asked for it; in a handoff another one reads the answer."""
    tool: str
    arguments: str
    turn_index: int
    answered_at: float


@dataclass(eq=False, kw_only=True)
class ProgramEpisode:
    """Runs one episode that a program plays."""

    recorder: Recorder
    id: str
    """The id in its URLs and its answers."""
    max_turns: int | None = None
    """The largest number of calls: a further one is refused with an error."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """The API key that its calls must send."""
    outcome: PostedOutcome | None = None
    exhausted: ContextExhausted | None = None
    """The last prompt that did not fit; the program got an error."""
    is_at_limit: bool = False
    """True where the program made a call beyond `max_turns`, and got an error."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the episode waits for nothing more from its program."""
    failure: BaseException | None = None
    """The error that ends the episode whatever the program does: the engines or Troupe failed, not the program."""
    refusal: ApiError | None = None
    """The error with which the last refused call was answered."""
    num_refused: int = 0
    _num_calls: int = 0
    _num_asked: Counter[str] = field(default_factory=Counter)
    _conversations: dict[str, Conversations] = field(default_factory=dict)
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _unread: dict[str, dict[str, int]] = field(default_factory=dict)
    """By agent and id of the call, the recorded tool calls whose answers no turn has read yet."""

    @property
    def agents(self) -> list[str]:
        """The names of the agents that a program may call."""
        return list(self.recorder.team.group_of)

    @property
    def growth(self) -> dict[str, dict[str, int]]:
        """The number of new, grown and broken calls of every agent."""
        return {name: {**conversations.counts} for name, conversations in self._conversations.items()}

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers of its answers."""
        return {}

    def agent_of(self, path: str | None, model: str) -> str:
        """Returns the agent that the path names, or else the model; where there is one agent every model name means it."""
        agents = self.agents
        name = path if path is not None else agents[0] if len(agents) == 1 else model
        if name in agents:
            return name
        self.num_refused += 1
        self.refusal = ApiError(
            404,
            f"there is no agent {name!r} in this episode; agents are {', '.join(agents)}",
            code="agent_not_found",
            param="model" if path is None else None,
        )
        raise self.refusal

    async def chat(self, agent: str, request: ChatRequest) -> dict[str, Any]:
        """Answers one call and records it as a turn; raises ApiError, and ends the episode with any other error."""
        try:
            return await self._chat(agent, request)
        except ApiError as refusal:
            self.refusal, self.num_refused = refusal, self.num_refused + 1
            raise
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: Exception) -> None:
        """Ends the episode with this error, which is not the program's."""
        self.failure = error
        self.is_over.set()

    def outcome_of(self, returned: Any, *, error: str = "") -> Outcome:
        """Returns the outcome that was posted, or else the one the program returned, with the growth of its
        conversations.

        Args: error: how the program failed although the episode counts.

        Raises ProgramError for a mapping that is no result.
        """
        posted = self.outcome
        result = _result(returned, is_posted=posted is not None)
        answer = result.get("answer", "") if posted is None or posted.answer is None else posted.answer
        score = result.get("score") if posted is None or posted.score is None else posted.score
        metadata = {**(result.get("metadata") or {}), **({} if posted is None else posted.metadata)}
        metadata[CONVERSATIONS] = self.growth
        if score is not None:
            metadata[SCORE] = score
        stop_reason = CONTEXT_EXHAUSTED if self.exhausted else TURN_LIMIT if self.is_at_limit else "finished"
        return Outcome(
            answer="" if answer is None else str(answer),
            stop_reason=stop_reason,
            is_truncated=stop_reason != "finished",
            metadata=metadata,
            error=error,
        )

    async def _chat(self, agent: str, request: ChatRequest) -> dict[str, Any]:
        if request.n > 1:
            raise ApiError(400, "an episode has one choice per call: ask n times", code="unsupported_value", param="n")
        if request.top_logprobs:
            raise ApiError(
                400, "top_logprobs are not kept in an episode", code="unsupported_value", param="top_logprobs"
            )
        _refuse_other_sampling(request)
        team = self.recorder.team
        tokenizer = team.tokenizers[team.group_of[agent]]
        if request.tools and not tokenizer.knows_tools:
            raise ApiError(400, "the model's chat template knows no tools", code="tools_unsupported", param="tools")
        self._count()
        own = team.workflow.agents[agent]
        messages = own.introduced([message.for_template() for message in request.messages])
        results = self._note_tool_answers(agent, request)
        conversations = self._conversations.setdefault(agent, Conversations(tokenizer))
        settings = request.prompt_settings(tokenizer, team.chat_template_kwargs.get(agent, {}))
        with refusals_of_template():
            prompt = await worked_on(
                request.num_characters,
                lambda: conversations.prompt(messages, tools=request.shown_tools, settings=settings),
            )
        reader = AnswerReader.of(request, tokenizer, team.parsers_of(team.group_of[agent]), prompt.text)
        constraint = await self._constraint(request, reader)
        # Some templates show the ids of calls: an episode that is played again, or by another team, must read the same ones.
        # So they come from what was asked: conversations at once reach this line in another order each time.
        asked = f"{agent}/{prompt.text}"
        self._num_asked[asked] += 1
        spec = self.recorder.spec
        place = f"{spec.task.task_id}/{spec.episode_index}/{asked}/{self._num_asked[asked]}"
        prefix = f"call_{sha256(place.encode()).hexdigest()[:12]}"
        turn, parsed = await self._turn(
            agent,
            Prompt(
                text=prompt.text,
                token_ids=prompt.token_ids,
                inputs={
                    "messages": json.dumps(messages),
                    **{f"message {i}": str(m["content"] or "") for i, m in enumerate(messages)},
                },
                parents=(*results.values(), *(() if prompt.continues is None else (prompt.continues,))),
            ),
            request,
            reader,
            prefix,
            constraint=constraint,
        )
        for call_id in results:
            self._unread[agent].pop(call_id, None)
        message = dict(parsed.data)
        conversations.add(messages, prompt, turn.completion_token_ids, answered=message, turn_index=turn.turn_index)
        now = time.perf_counter()
        for call in message.get("tool_calls", ()):
            of = call["function"]
            self._asked[call["id"]] = _Asked(agent, of["name"], of["arguments"], turn.turn_index, now)
        return _answer_body(self.id, request, turn, message, reader)

    def _count(self) -> None:
        """Counts one more call; ApiError where that is too many."""
        if self.max_turns is not None and self._num_calls >= self.max_turns:
            self.is_at_limit = True
            raise ApiError(400, f"an episode has at most {self.max_turns} turns: post its outcome", code=TURN_LIMIT)
        self._num_calls += 1

    async def _constraint(self, request: ChatRequest, reader: AnswerReader) -> str:
        """Returns `prepared_constraint`; a form that was not tried ends the episode as a fault of the machine."""
        try:
            # All episodes of a collector may ask with forms of their own at once, and what a program makes of a refusal counts as the policy's.
            return await prepared_constraint(request, reader, is_patient=True)
        except ApiError as error:
            if error.code == OVERLOADED:
                self.fail(PolicyCallError(str(error)))
            raise

    async def _turn(
        self, agent: str, prompt: Prompt, request: ChatRequest, reader: AnswerReader, prefix: str, *, constraint: str
    ) -> tuple[Turn, Parsed]:
        def parse(text: str) -> Parsed:
            shown = _until(text, request.stops)
            message = reader.message(shown, id_prefix=prefix)
            is_unreadable = reader.tools.is_unreadable(message["content"])
            return Parsed(fields={}, fault="a tool call that cannot be read" if is_unreadable else "", data=message)

        try:
            return await self.recorder.turn(
                agent, prompt, parse=parse, max_tokens=request.limit, stops=request.stops, constraint=constraint
            )
        except asyncio.CancelledError:
            self._num_calls -= 1  # the program went away, and may ask again
            raise
        except ContextExhausted as error:
            self.exhausted = error
            limit = self.recorder.team.max_model_len[self.recorder.team.group_of[agent]]
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, {error}",
                code="context_length_exceeded",
                param="messages",
            ) from None
        except RequestRefused as error:
            if not constraint:
                raise
            self._num_calls -= 1  # it may ask again, without the form
            raise ApiError(400, f"the engine refuses this form: {error}", code="invalid_value") from None
        except (TimeoutError, PolicyCallError) as error:
            self.fail(error)
            raise ApiError(503, str(error), code="engine_unavailable") from None

    def _note_tool_answers(self, agent: str, request: ChatRequest) -> dict[str, int]:
        """Records the tool calls that these messages answer, once each.

        Returns, by id, the indices among the events of those in these messages that no turn of this agent has read, also from a
        call that its program gave up.
        """
        unread = self._unread.setdefault(agent, {})
        for message in request.messages:
            asked = self._asked.pop(message.tool_call_id or "", None)
            if message.role == "tool" and asked is not None:
                index = self.recorder.tool_recorder.used(
                    asked.tool,
                    caller=asked.caller,
                    turn=asked.turn_index,
                    request=json.loads(asked.arguments),
                    response=message.text or "",
                    began=asked.answered_at,
                    spans=self.recorder.spans,
                )
                unread[message.tool_call_id or ""] = index
        return {i: unread[i] for message in request.messages if (i := message.tool_call_id or "") in unread}


def _result(returned: Any, *, is_posted: bool) -> Mapping[str, Any]:
    """Returns what a program returned as `answer`, `score` and `metadata`; ProgramError where it means another form.

    A mapping without these keys has its answer under another name, which would count as an empty one; not where an outcome is posted.
    """
    if not isinstance(returned, Mapping):
        return {"answer": returned}
    keys = [str(key) for key in returned if key != "id"]
    if keys and not is_posted and not {"answer", "score", "metadata"} & {*keys}:
        raise ProgramError(
            f"the program returned a mapping with the keys {', '.join(keys)}: an answer has the key 'answer'"
        )
    if not isinstance(returned.get("metadata") or {}, Mapping):
        raise ProgramError(f"the program returned metadata = {str(returned['metadata'])[:80]!r}: metadata is a mapping")
    return returned


def _answer_body(
    episode_id: str, request: ChatRequest, turn: Turn, message: Mapping[str, Any], reader: AnswerReader
) -> dict[str, Any]:
    """Returns the chat completion that answers a request. Args: message: the assistant's message of the turn."""
    reason = "length" if turn.finish_reason is FinishReason.LENGTH else "stop"
    if reason == "stop" and "tool_calls" in message:
        reason = "tool_calls"
    logprobs = reader.logprobs(turn.completion_token_ids, turn.rollout_logprobs) if request.logprobs else None
    return {
        "id": f"chatcmpl-{episode_id}-{turn.turn_index}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"{turn.model_group}@{turn.policy_version}",
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason, "logprobs": logprobs}],
        "usage": usage_body(len(turn.prompt_token_ids), len(turn.completion_token_ids))
        | reader.usage([turn.completion_token_ids]),
        "troupe": {"agent": turn.agent, "turn": turn.turn_index, "temperature": turn.sampling.temperature},
    }


def _refuse_other_sampling(request: ChatRequest) -> None:
    """Raises ApiError 400 where a call asks for a distribution that the trainer could not compute again from its turn.

    Temperature, filters and penalties are the run's whatever a call says.
    """
    names = [name for name in FOREIGN_SAMPLING if name in request.engine_settings]
    if names:
        raise ApiError(
            400,
            f"{names[0]} changes what is sampled, which an episode's turns do not record: leave it out here",
            code="unsupported_value",
            param=names[0],
        )


def _until(text: str, stops: list[str]) -> str:
    """Returns the text before the first stop text."""
    return text[: min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=len(text))]
