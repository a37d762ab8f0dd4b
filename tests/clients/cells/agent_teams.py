"""agent_teams: frameworks of agents with prompts of their own: pydantic-ai, smolagents, autogen, crewai, dspy."""

from __future__ import annotations

import asyncio
from typing import Any

from cells.asked import KEY, MODEL, PARAMETERS, QUESTION, URL, Answer, Cells, multiply


def pydantic_ai() -> Cells:
    from pydantic_ai import Agent, ModelRequest, NativeOutput, PromptedOutput, ToolDefinition
    from pydantic_ai.direct import model_request_sync
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))

    def run(**settings: Any) -> Any:
        return Agent(model, **settings).run_sync(QUESTION).output

    def forced() -> Any:
        tool = ToolDefinition(name="multiply", description="Multiply.", parameters_json_schema=PARAMETERS)
        parameters = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
        asked = [ModelRequest.user_text_prompt(QUESTION)]
        return model_request_sync(model, asked, model_request_parameters=parameters).parts[0].args

    async def stream() -> list[str]:
        async with Agent(model).run_stream(QUESTION) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    return {
        "plain": run,
        "tools": lambda: run(tools=[multiply]),
        "streaming": lambda: asyncio.run(stream()),
        "typed": lambda: run(output_type=Answer).value,
        "typed, native": lambda: run(output_type=NativeOutput(Answer)).value,
        "typed, prompted": lambda: run(output_type=PromptedOutput(Answer)).value,
        "forced": forced,
    }


def smolagents() -> Cells:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id=MODEL, api_base=URL, api_key=KEY)
    asked: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}

    return {
        "plain": lambda: model(asked).content,
        "tools": lambda: ToolCallingAgent(tools=[tool(multiply)], model=model, max_steps=3).run(QUESTION),
        "streaming": lambda: [part.content for part in model.generate_stream(asked)],
        "typed": lambda: Answer.model_validate_json(model.generate(asked, response_format=form).content).value,
        "forced": lambda: model.generate(asked, tools_to_call_from=[tool(multiply)]).tool_calls[0].function.arguments,
    }


def autogen() -> Cells:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    abilities: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "structured_output": True,
        "family": "unknown",
    }

    def client() -> Any:  # a client belongs to the event loop that has used it
        return OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=abilities, max_retries=0)

    async def run(**settings: Any) -> Any:
        result = await AssistantAgent("solver", client(), **settings).run(task=QUESTION)
        return result.messages[-1].content

    async def stream() -> list[str]:
        events = AssistantAgent("solver", client(), model_client_stream=True).run_stream(task=QUESTION)
        return [event.content async for event in events if event.__class__.__name__ == "ModelClientStreamingChunkEvent"]

    async def forced() -> str:
        tool = FunctionTool(multiply, description="Multiply.")
        asked = [UserMessage(content=QUESTION, source="user")]
        answer = await client().create(asked, tools=[tool], tool_choice="required")
        return str(answer.content[0].arguments)

    return {
        "plain": lambda: asyncio.run(run()),
        "tools": lambda: asyncio.run(run(tools=[multiply])),
        "tools, reflected": lambda: asyncio.run(run(tools=[multiply], reflect_on_tool_use=True)),
        "streaming": lambda: asyncio.run(stream()),
        "typed": lambda: asyncio.run(run(output_content_type=Answer)).value,
        "forced": lambda: asyncio.run(forced()),
    }


def crewai() -> Cells:
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    llm = LLM(model=f"openai/{MODEL}", base_url=URL, api_key=KEY)

    def crew(*, tools: Any = (), stream: bool = False, **settings: Any) -> Any:
        agent = Agent(role="Solver", goal="Solve.", backstory="You calculate.", llm=llm, tools=list(tools))
        task = Task(description=QUESTION, expected_output="A number.", agent=agent, **settings)
        return Crew(agents=[agent], tasks=[task], stream=stream).kickoff()

    return {
        "plain": lambda: crew().raw,
        "tools": lambda: crew(tools=[tool(multiply)]).raw,
        "streaming": lambda: [part.content for part in crew(stream=True)],
        "typed": lambda: crew(output_pydantic=Answer).pydantic.value,
    }


def dspy() -> Cells:
    import dspy

    dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=URL, api_key=KEY, cache=False, num_retries=0))
    predict = dspy.Predict("question -> answer")

    class Typed(dspy.Signature):
        """Answer the question."""

        question: str = dspy.InputField()
        result: Answer = dspy.OutputField()

    async def stream() -> list[str]:
        listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]
        parts = dspy.streamify(predict, stream_listeners=listeners)(question=QUESTION)
        return [part.chunk async for part in parts if isinstance(part, dspy.streaming.StreamResponse)]

    return {
        "plain": lambda: predict(question=QUESTION).answer,
        "tools": lambda: dspy.ReAct("question -> answer", tools=[multiply])(question=QUESTION).answer,
        "streaming": lambda: asyncio.run(stream()),
        "typed": lambda: dspy.Predict(Typed)(question=QUESTION).result.value,
    }
