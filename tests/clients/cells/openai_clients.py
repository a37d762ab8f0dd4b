"""openai_clients: OpenAI's client, and what is a thin layer over it: openai-agents, instructor, litellm."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from cells.asked import CALLS, GROUP, KEY, MESSAGES, MODEL, QUESTION, TOOL, URL, Answer, Cells, multiply


def openai() -> Cells:
    from openai import OpenAI

    client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    ask: Any = {"model": MODEL, "messages": MESSAGES}

    def stream() -> list[str]:
        with client.chat.completions.stream(**ask) as events:
            return [event.delta for event in events if event.type == "content.delta"]

    def tools() -> Any:
        message = client.chat.completions.create(**ask, tools=[TOOL]).choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": str(_called(call.function.arguments))}
        return client.chat.completions.create(model=MODEL, messages=[*MESSAGES, message, result], tools=[TOOL])

    def forced(choice: Any) -> str:
        message = client.chat.completions.create(**ask, tools=[TOOL], tool_choice=choice).choices[0].message
        return str(message.tool_calls[0].function.arguments)

    def responses_stream() -> list[str]:
        events = client.responses.create(model=MODEL, input=QUESTION, stream=True)
        return [event.delta for event in events if event.type == "response.output_text.delta"]

    flat = {"type": "function", **TOOL["function"]}
    return {
        "plain": lambda: client.chat.completions.create(**ask).choices[0].message.content,
        "tools": lambda: tools().choices[0].message.content,
        "streaming": stream,
        "typed": lambda: client.chat.completions.parse(**ask, response_format=Answer).choices[0].message.parsed.value,
        "forced": lambda: forced("required"),
        "forced, named": lambda: forced({"type": "function", "function": {"name": "multiply"}}),
        "plain, responses": lambda: client.responses.create(model=MODEL, input=QUESTION).output_text,
        "streaming, responses": responses_stream,
        "typed, responses": lambda: (
            client.responses.parse(model=MODEL, input=QUESTION, text_format=Answer).output_parsed.value
        ),
        "forced, responses": lambda: (
            client.responses.create(model=MODEL, input=QUESTION, tools=[flat], tool_choice="required")
            .output[0]
            .arguments
        ),
    }


def _called(arguments: str) -> int:
    return multiply(**json.loads(arguments))


def openai_agents() -> Cells:
    from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = MODEL.replace("/", "--")  # a slash would name a provider
    tool = function_tool(multiply)

    def fresh_client() -> None:  # a client belongs to the event loop that has used it
        set_default_openai_client(AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))

    def run(**settings: Any) -> Any:
        fresh_client()
        agent = Agent(name="solver", instructions="Answer.", model=model, **settings)
        return Runner.run_sync(agent, QUESTION, max_turns=3)

    async def stream() -> list[str]:
        fresh_client()
        events = Runner.run_streamed(Agent(name="solver", model=model), QUESTION).stream_events()
        raw = [event.data async for event in events if event.type == "raw_response_event"]
        return [data.delta for data in raw if data.type == "response.output_text.delta"]

    def forced() -> Any:
        settings = ModelSettings(tool_choice="required")
        run(tools=[tool], tool_use_behavior="stop_on_first_tool", model_settings=settings)
        return CALLS[-1]

    return {
        "plain": lambda: run().final_output,
        "tools": lambda: run(tools=[tool]).final_output,
        "streaming": lambda: asyncio.run(stream()),
        "typed": lambda: run(output_type=Answer).final_output.value,
        "forced": forced,
    }


def instructor() -> Cells:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0))
    ask: Any = {"model": MODEL, "messages": MESSAGES, "max_retries": 0}
    return {
        "typed": lambda: client.chat.completions.create(**ask, response_model=Answer).value,
        "typed, streamed": lambda: list(client.chat.completions.create_partial(**ask, response_model=Answer))[-1].value,
    }


def litellm() -> Cells:
    import litellm

    ask: Any = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "messages": MESSAGES}
    text: Any = {"model": f"text-completion-openai/{GROUP}", "api_base": URL, "api_key": KEY}

    def tools() -> Any:
        message = litellm.completion(**ask, tools=[TOOL]).choices[0].message
        (call,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": str(_called(call.function.arguments))}
        return litellm.completion(**ask | {"messages": [*MESSAGES, message, result]}, tools=[TOOL])

    def forced() -> str:
        message = litellm.completion(**ask, tools=[TOOL], tool_choice="required").choices[0].message
        return str(message.tool_calls[0].function.arguments)

    def typed() -> int:
        content = litellm.completion(**ask, response_format=Answer).choices[0].message.content
        return Answer.model_validate_json(content).value

    return {
        "plain": lambda: litellm.completion(**ask).choices[0].message.content,
        "tools": lambda: tools().choices[0].message.content,
        "streaming": lambda: [part.choices[0].delta.content for part in litellm.completion(**ask, stream=True)],
        "typed": typed,
        "forced": forced,
        "plain, text completion": lambda: litellm.text_completion(**text, prompt="6 times").choices[0].text,
    }
