"""chat: a chat request and the team that answers it -> a model call.

messages --template--> prompt ids --policy app--> token ids --> text   (chat_reply: --> OpenAI's form)
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from serve_apps.chat.long_texts import worked_on
from serve_apps.chat.tokenizer import PromptSettings
from serve_apps.gateway.calls.model_call import ModelCall, check_length, check_logprobs, room_for_completion
from serve_apps.gateway.traffic.teams import ServedTeam
from serve_apps.openai_api.answer_reader import AnswerReader
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.constraints import prepared_constraint
from serve_apps.openai_api.protocol import ApiError
from serve_apps.openai_api.template_refusals import refusals_of_template
from stores.types import Sampling

PROMPT_END = 256
"""Characters at the end of a prompt in which marks of thoughts are looked for."""


@dataclass(kw_only=True)
class Chat(ModelCall):
    """The model call of a chat."""

    request: ChatRequest
    agent: str | None
    reader: AnswerReader

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens of prompt and completions, as far as they have been sampled, and how many of them are thoughts."""
        return super().usage | self.reader.usage([choice.token_ids for choice in self.choices.values()])


def chat_prompt(request: ChatRequest, team: ServedTeam, model_group: str, agent: str | None) -> str:
    """Returns the prompt of a chat as marked text (see `ChatTokenizer.mark_chat`); ApiError 400 where it has none."""
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
    settings = PromptSettings(
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=tokenizer.known_variables(request.template_variables),
    )
    with refusals_of_template():
        return tokenizer.mark_chat(messages, tools=request.shown_tools, settings=settings)


def chat_tokens(request: ChatRequest, team: ServedTeam, model_group: str, agent: str | None) -> tuple[str, list[int]]:
    """Returns the prompt of a chat as marked text and as tokens; ApiError 400 where it has none, or does not fit the context."""
    tokenizer, context = team.acting.tokenizers[model_group], team.acting.max_model_len[model_group]
    marked = chat_prompt(request, team, model_group, agent)
    if len(marked) > context:
        check_length(tokenizer.plain(marked), tokenizer, context)
    return marked, tokenizer.encode_marked(marked)


async def prepare_chat(
    request: ChatRequest, team: ServedTeam, model_group: str, agent: str | None, *, kind: str = "chatcmpl"
) -> Chat:
    """Tokenizes a request and settles how to sample it; ApiError 400 where it does not fit the model.

    Args: kind: what the id of the reply begins with.
    """
    tokenizer = team.acting.tokenizers[model_group]
    marked, prompt = await worked_on(request.num_characters, lambda: chat_tokens(request, team, model_group, agent))
    max_completion = room_for_completion(request.limit, len(prompt), team.acting.max_model_len[model_group])
    default = team.acting.sampling[agent] if agent is not None else Sampling(max_tokens=max_completion, temperature=1.0)
    max_tokens = request.limit or min(default.max_tokens, max_completion)
    if request.logprobs:
        check_logprobs(request.n * max_tokens, request.top_logprobs)
    prompt_end = tokenizer.plain(marked[-PROMPT_END:])
    reader = AnswerReader.of(request, tokenizer, team.acting.parsers_of(model_group), prompt_end)
    sampling = replace(
        default,
        max_tokens=max_tokens,
        temperature=default.temperature if request.temperature is None else request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        constraint=await prepared_constraint(request, reader),
    )
    variables = request.template_variables
    return Chat(
        request=request,
        team=team,
        model_group=model_group,
        agent=agent,
        prompt_token_ids=prompt,
        sampling=sampling,
        reader=reader,
        top_logprobs=request.top_logprobs,
        id=f"{kind}-{secrets.token_hex(12)}",
        settings=request.engine_settings,
        ignored=[*request.dropped, *sorted(variables.keys() - tokenizer.known_variables(variables).keys())],
    )
