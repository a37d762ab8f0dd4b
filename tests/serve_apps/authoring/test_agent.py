r"""What an author declares: the templates of an agent, a tool's function, the agents of a workflow's subclass."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import BaseModel, ValidationError

from serve_apps.authoring.agent import Agent, Tool
from serve_apps.authoring.choices import Choice
from serve_apps.authoring.workflow import Workflow

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("text", [r"Write \boxed{}.", r"Write \boxed{", 'Write {"a": 1}.', "{0}", "{task.prompt}", "}"])
@pytest.mark.parametrize("part", ["system", "prompt"])
def test_a_brace_that_names_no_input_is_refused_where_it_is_declared(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=rf"Agent\.{part}: .*brace of the text itself twice"):
        Agent(**{"prompt": "{question}", part: text})
    twice = text.replace("{", "{{").replace("}", "}}")
    assert Agent(prompt=twice).messages({}) == [{"role": "user", "content": text}]


@pytest.mark.parametrize("temperature", [-1.0, 0.005])
def test_a_temperature_at_which_no_engine_samples_is_refused(temperature: float) -> None:
    """vLLM takes 0.005 for 0.01, and the trainer would have divided by 0.005."""
    with pytest.raises(ValueError, match=rf"Agent.temperature = {temperature:g}: .* no colder than 0.01"):
        Agent(prompt="x", temperature=temperature)
    assert Agent(prompt="x", temperature=0.01).sampling.temperature == 0.01


def test_a_system_message_with_braces_but_without_inputs_introduces_a_callers_messages() -> None:
    asked = [{"role": "user", "content": "hi"}]
    said = [{"role": "system", "content": 'Reply {"a": 1}.'}, *asked]
    assert Agent(prompt="{question}", system='Reply {{"a": 1}}.').introduced(asked) == said
    assert Agent(prompt="{question}", system="You are {name}.").introduced(asked) == asked


class Fetched(BaseModel):
    """What a service answers."""

    pages: int


async def fetch(query: str) -> str:
    """Reads the answer of a service that has changed."""
    return str(Fetched.model_validate({"query": query}).pages)


def test_what_a_tools_function_finds_wrong_itself_is_no_argument() -> None:
    with pytest.raises(ValidationError, match="Fetched\npages\n"):
        asyncio.run(Tool(fetch)(query="a"))


class Reviewed(Workflow):
    """Two agents."""

    solver = Agent(prompt="{question}")
    reviewer = Agent(prompt="{answer}")


def test_a_subclass_may_take_an_agent_away_or_make_it_a_tool() -> None:
    assert list(type("Alone", (Reviewed,), {"reviewer": None}).agents) == ["solver"]
    checked = type("Checked", (Reviewed,), {"reviewer": Tool(fetch)})
    assert (list(checked.agents), list(checked.tools)) == (["solver"], ["reviewer"])


def test_what_a_choice_says_of_its_options_is_a_part_of_the_prompts() -> None:
    def prompts(**options: str) -> str:
        router = Agent(prompt="{options}", contract=Choice(options))
        return type("Routed", (Workflow,), {"router": router})().prompts_sha256

    assert len({prompts(go="on", stop=""), prompts(go="further", stop=""), prompts(go="on", end="")}) == 3
