"""chains: frameworks of components around a chat model: langchain, langgraph, llama-index, haystack."""

from __future__ import annotations

import asyncio
from typing import Any

from cells.asked import GROUP, KEY, MESSAGES, MODEL, QUESTION, URL, Answer, Cells, multiply


def langchain() -> Cells:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_retries=0)
    times = tool(multiply)

    def tools() -> Any:
        bound = chat.bind_tools([times])
        said = bound.invoke(QUESTION)
        (call,) = said.tool_calls
        result = ToolMessage(str(times.invoke(call["args"])), tool_call_id=call["id"])
        return bound.invoke([HumanMessage(QUESTION), said, result]).content

    return {
        "plain": lambda: chat.invoke(QUESTION).content,
        "tools": tools,
        "streaming": lambda: [part.content for part in chat.stream(QUESTION)],
        "typed": lambda: chat.with_structured_output(Answer).invoke(QUESTION).value,
        "typed, function calling": lambda: (
            chat.with_structured_output(Answer, method="function_calling").invoke(QUESTION).value
        ),
        "typed, JSON mode": lambda: chat.with_structured_output(Answer, method="json_mode").invoke(QUESTION).value,
        "forced": lambda: chat.bind_tools([times], tool_choice="multiply").invoke(QUESTION).tool_calls[0]["args"],
        "forced, any": lambda: chat.bind_tools([times], tool_choice="any").invoke(QUESTION).tool_calls[0]["args"],
    }


def langgraph() -> Cells:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    chat = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, max_retries=0)
    asked = {"messages": MESSAGES}

    def stream() -> list[str]:
        parts = create_react_agent(chat, []).stream(asked, stream_mode="messages")
        return [part.content for part, _ in parts]

    return {
        "plain": lambda: create_react_agent(chat, []).invoke(asked)["messages"][-1].content,
        "tools": lambda: create_react_agent(chat, [tool(multiply)]).invoke(asked)["messages"][-1].content,
        "streaming": stream,
        "typed": lambda: (
            create_react_agent(chat, [], response_format=Answer).invoke(asked)["structured_response"].value
        ),
    }


def llama_index() -> Cells:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    where: Any = {"api_base": URL, "api_key": KEY, "max_retries": 0, "context_window": 16_384}
    chat = OpenAILike(model=MODEL, is_chat_model=True, is_function_calling_model=True, **where)
    asked = [ChatMessage(role="user", content=QUESTION)]

    async def agent() -> str:
        return str(await FunctionAgent(tools=[multiply], llm=chat).run(QUESTION))

    def forced() -> Any:
        tool = FunctionTool.from_defaults(multiply)
        answer = chat.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
        return chat.get_tool_calls_from_response(answer)[0].tool_kwargs

    return {
        "plain": lambda: chat.chat(asked).message.content,
        "tools": lambda: asyncio.run(agent()),
        "streaming": lambda: [part.delta for part in chat.stream_chat(asked)],
        "typed": lambda: chat.as_structured_llm(Answer).chat(asked).raw.value,
        "forced": forced,
        "plain, text completion": lambda: OpenAILike(model=GROUP, **where).complete("6 times").text,
    }


def haystack() -> Cells:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    tool = create_tool_from_function(multiply)
    asked = [ChatMessage.from_user(QUESTION)]

    def generator(**settings: Any) -> Any:
        return OpenAIChatGenerator(api_key=Secret.from_token(KEY), api_base_url=URL, model=MODEL, **settings)

    def run(**settings: Any) -> Any:
        return generator(**settings).run(asked)["replies"][0]

    def stream() -> list[str]:
        pieces: list[Any] = []
        run(streaming_callback=pieces.append)
        return [piece.content for piece in pieces]

    return {
        "plain": lambda: run().text,
        "tools": lambda: Agent(chat_generator=generator(), tools=[tool]).run(asked)["last_message"].text,
        "streaming": stream,
        "typed": lambda: Answer.model_validate_json(run(generation_kwargs={"response_format": Answer}).text).value,
        "forced": lambda: run(tools=[tool], generation_kwargs={"tool_choice": "required"}).tool_calls[0].arguments,
    }
