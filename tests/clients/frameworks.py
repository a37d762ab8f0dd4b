"""frameworks: agent frameworks by their documented defaults against a gateway: plain, tools, streaming, typed answer, forced call.

    uv venv /tmp/clients && uv pip install --python /tmp/clients -r tests/clients/requirements.txt
    /tmp/clients/bin/python tests/clients/frameworks.py http://127.0.0.1:8000/v1 TEAM/AGENT [FRAMEWORK ...]

The environment is one of its own: frameworks pin other versions than Troupe. CELLS=tools,forced plays those cells alone. The model's chat
template must know tools. Prints one JSON line per cell: {"framework", "version", "cell", "ok", "said"}. A cell is ok where the framework gives back what it
promises: a text, a call of the tool, pieces of a stream, an object of the type. Whether the model is right is not asked.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]
KEY = os.environ.get("OPENAI_API_KEY", "none")
LIMIT = 200
QUESTION = "What is 6 times 7? Answer with a number."


class Answer(BaseModel):
    """A typed answer."""

    value: bool


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b


PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": PARAMETERS}}
MESSAGES: Any = [{"role": "user", "content": QUESTION}]

Cells = dict[str, Callable[[], Any]]


def _openai() -> Cells:
    from openai import OpenAI

    client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
    ask: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": LIMIT}

    def stream() -> str:
        with client.chat.completions.stream(**ask) as events:
            return str(events.get_final_completion().choices[0].message.content)

    return {
        "plain": lambda: client.chat.completions.create(**ask).choices[0].message.content,
        "tools": lambda: client.chat.completions.create(**ask, tools=[TOOL]).choices[0].message.role,
        "streaming": stream,
        "typed": lambda: client.chat.completions.parse(**ask, response_format=Answer).choices[0].message.parsed.value,
        "forced": lambda: (
            client.chat.completions.create(**ask, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0]
        ),
        "responses": lambda: client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=LIMIT).output_text,
    }


def _openai_agents() -> Cells:
    from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = MODEL.replace("/", "--")  # a slash would name a provider
    tool = function_tool(multiply)

    def fresh_client() -> None:  # a client belongs to the event loop that has used it
        set_default_openai_client(AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))

    def run(**settings: Any) -> Any:
        fresh_client()
        limits = ModelSettings(max_tokens=LIMIT, **settings.pop("model_settings", {}))
        agent = Agent(name="solver", instructions="Answer.", model=model, model_settings=limits, **settings)
        return Runner.run_sync(agent, QUESTION, max_turns=3)

    async def stream() -> int:
        fresh_client()
        agent = Agent(name="solver", model=model, model_settings=ModelSettings(max_tokens=LIMIT))
        events = Runner.run_streamed(agent, QUESTION).stream_events()
        return len([event async for event in events if event.type == "raw_response_event"])

    def forced() -> Any:
        result = run(tools=[tool], tool_use_behavior="stop_on_first_tool", model_settings={"tool_choice": "required"})
        return result.final_output

    return {
        "plain": lambda: run().final_output,
        "tools": lambda: run(tools=[tool]).new_items[0].type,
        "streaming": lambda: asyncio.run(stream()),
        "typed": lambda: run(output_type=Answer).final_output.value,
        "forced": forced,
    }


def _langchain() -> Cells:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_retries=0, max_tokens=LIMIT)
    times = tool(multiply)
    return {
        "plain": lambda: chat.invoke(QUESTION).content,
        "tools": lambda: chat.bind_tools([times]).invoke(QUESTION).type,
        "streaming": lambda: len(list(chat.stream(QUESTION))),
        "typed": lambda: chat.with_structured_output(Answer).invoke(QUESTION).value,
        "forced": lambda: chat.bind_tools([times], tool_choice="multiply").invoke(QUESTION).tool_calls[0]["args"],
    }


def _langgraph() -> Cells:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    chat = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_retries=0, max_tokens=LIMIT)
    asked = {"messages": MESSAGES}
    return {
        "plain": lambda: create_react_agent(chat, []).invoke(asked)["messages"][-1].content,
        "tools": lambda: (
            create_react_agent(chat, [tool(multiply)]).invoke(asked, {"recursion_limit": 6})["messages"][-1].type
        ),
        "streaming": lambda: len(list(create_react_agent(chat, []).stream(asked, stream_mode="messages"))),
        "typed": lambda: (
            create_react_agent(chat, [], response_format=Answer).invoke(asked)["structured_response"].value
        ),
    }


def _pydantic_ai() -> Cells:
    from pydantic_ai import Agent, NativeOutput, PromptedOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    settings: Any = {"max_tokens": LIMIT}

    async def stream() -> str:
        async with Agent(model, model_settings=settings).run_stream(QUESTION) as result:
            return str(await result.get_output())

    return {
        "plain": lambda: Agent(model, model_settings=settings).run_sync(QUESTION).output,
        "tools": lambda: Agent(model, tools=[multiply], model_settings=settings).run_sync(QUESTION).output,
        "streaming": lambda: asyncio.run(stream()),
        "typed": lambda: Agent(model, output_type=Answer, model_settings=settings).run_sync(QUESTION).output.value,
        "typed, native": lambda: (
            Agent(model, output_type=NativeOutput(Answer), model_settings=settings).run_sync(QUESTION).output.value
        ),
        "typed, prompted": lambda: (
            Agent(model, output_type=PromptedOutput(Answer), model_settings=settings).run_sync(QUESTION).output.value
        ),
    }


def _instructor() -> Cells:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0))
    ask: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": LIMIT, "max_retries": 0}
    return {
        "typed": lambda: client.chat.completions.create(**ask, response_model=Answer).value,
        "streaming": lambda: [
            part.value for part in client.chat.completions.create_partial(**ask, response_model=Answer)
        ],
    }


def _smolagents() -> Cells:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id=MODEL, api_base=URL, api_key=KEY, max_tokens=LIMIT)
    asked: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    return {
        "plain": lambda: model(asked).content,
        "streaming": lambda: len(list(model.generate_stream(asked))),
        "forced": lambda: model.generate(asked, tools_to_call_from=[tool(multiply)]).tool_calls[0].function.name,
        "agent": lambda: str(ToolCallingAgent(tools=[tool(multiply)], model=model, max_steps=1).run(QUESTION)),
    }


def _litellm() -> Cells:
    import litellm

    ask: Any = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "messages": MESSAGES, "max_tokens": LIMIT}
    text: Any = {
        "model": f"text-completion-openai/{MODEL.rpartition('/')[0]}/group/model",
        "api_base": URL,
        "api_key": KEY,
    }
    return {
        "plain": lambda: litellm.completion(**ask).choices[0].message.content,
        "tools": lambda: litellm.completion(**ask, tools=[TOOL]).choices[0].message.role,
        "streaming": lambda: len(list(litellm.completion(**ask, stream=True))),
        "typed": lambda: (
            Answer.model_validate_json(
                litellm.completion(**ask, response_format=Answer).choices[0].message.content
            ).value
        ),
        "forced": lambda: (
            litellm.completion(**ask, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0]
        ),
        "completions": lambda: litellm.text_completion(**text, prompt="6*7 =", max_tokens=5).choices[0].text,
    }


def _haystack() -> Cells:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    def run(**settings: Any) -> Any:
        more = {"max_tokens": LIMIT, **settings.pop("generation_kwargs", {})}
        generator = OpenAIChatGenerator(
            api_key=Secret.from_token(KEY), api_base_url=URL, model=MODEL, generation_kwargs=more, **settings
        )
        return generator.run([ChatMessage.from_user(QUESTION)])["replies"][0]

    pieces: list[Any] = []
    tool = create_tool_from_function(multiply)
    return {
        "plain": lambda: run().text,
        "tools": lambda: run(tools=[tool]).role.value,
        "streaming": lambda: (run(streaming_callback=pieces.append), len(pieces))[1],
        "typed": lambda: Answer.model_validate_json(run(generation_kwargs={"response_format": Answer}).text).value,
        "forced": lambda: run(tools=[tool], generation_kwargs={"tool_choice": "required"}).tool_calls[0].arguments,
    }


FRAMEWORKS: dict[str, Callable[[], Cells]] = {
    "openai": _openai,
    "openai-agents": _openai_agents,
    "langchain-openai": _langchain,
    "langgraph": _langgraph,
    "pydantic-ai-slim": _pydantic_ai,
    "instructor": _instructor,
    "smolagents": _smolagents,
    "litellm": _litellm,
    "haystack-ai": _haystack,
}


def main() -> None:
    """Prints a line per cell."""
    cells = [cell for cell in os.environ.get("CELLS", "").split(",") if cell]
    for name in sys.argv[3:] or FRAMEWORKS:
        version = importlib.metadata.version(name)
        for cell, play in FRAMEWORKS[name]().items():
            if cells and cell not in cells:
                continue
            try:
                value = play()
                ok = value is not None and value != [] and value != ""
                said = str(value)
            except Exception as error:  # noqa: BLE001 - whatever a framework raises is what the cell says
                ok, said = False, f"{type(error).__name__}: {error}"
            line = {"framework": name, "version": version, "cell": cell, "ok": ok, "said": " ".join(said.split())[:300]}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
