"""Choices: an option is one token, what is offered is stored with the turn, and a message is a second turn of the same agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from one_group import play, saying

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.choices import LABELS, Choice
from serve_apps.authoring.contracts import Thinking
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.episode.scripted import play_scripted
from serve_apps.episode_spec import Script
from stores.traces.rows import episode_table, traces_of
from stores.types import Cause, EpisodeStatus, FinishReason, Task, Trace

pytestmark = pytest.mark.fast

ROUTES = Choice({"ask": "the solver works", "look": "", "stop": "the answer is final"}, messages=["ask"])
TASK = Task(task_id="t", prompt="2 + 2", answers=("4",))
PROMPT = "Task: {question}\n{options}"


class Routed(Workflow):
    """A router asks the solver until it stops; once it has asked it may not ask again."""

    router = Agent(prompt=PROMPT, contract=ROUTES, max_tokens=30)
    solver = Agent(prompt="Solve: {message}", max_tokens=30)

    def __init__(self, **offered: Any) -> None:
        self.offered = offered

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        reply = await agents.router(question=task.prompt, **self.offered)
        answer = ""
        if reply["choice"] == "ask":
            answer = (await agents.solver(message=reply["message"])).text
            reply = await agents.router(question=task.prompt, options=["stop", "look"])
        return Outcome(answer=answer, stop_reason=str(reply["choice"]))


def test_an_option_keeps_its_label_whatever_else_is_offered() -> None:
    assert ROUTES.label_of == {"ask": "A", "look": "B", "stop": "C"}
    names, inputs = ROUTES.offered({"question": "q"})
    assert names == ["ask", "look", "stop"]
    assert inputs == {
        "question": "q",
        "options": "A ask: the solver works\nB look\nC stop: the answer is final",
    }
    names, inputs = ROUTES.offered({"options": ["stop", "look"]})
    assert (names, inputs["options"]) == (["look", "stop"], "B look\nC stop: the answer is final")
    assert ROUTES.offered({"options": "stop"})[0] == ["stop"]


def test_a_label_is_read_and_anything_else_is_a_fault() -> None:
    assert dict(ROUTES.parse("C").fields) == {"choice": "stop", "message": ""}
    assert ROUTES.parse("C").fault == "" and ROUTES.parse(" B\n").fields["choice"] == "look"
    for text in ("", "D", "stop", "AB"):
        parsed = ROUTES.parse(text)
        assert parsed.fields["choice"] == "" and parsed.fault.startswith("no option is called "), text


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: Choice(["stop"]), "1 options: declare 2 to 20"),
        (lambda: Choice([f"o{i}" for i in range(len(LABELS) + 1)]), "21 options"),
        (lambda: Choice(["a", "b"], messages=["c"]), r"messages = \['c'\], which are no options: a, b"),
        (lambda: Agent(prompt="choose", contract=ROUTES), r"\{options\} is missing"),
        (lambda: ROUTES.offered({"options": ["stop", "sing"]}), r"options = \['sing'\]: this agent's Choice has ask, look, stop"),
        (lambda: Choice(["a", "b", "a"]), "an option comes twice"),
        (lambda: Choice("ab"), "lists of names, not one text"),
        (lambda: Choice(["a", "b"], ask='{"q": 1}'), "is no template of"),
        (lambda: Agent(prompt="{options}", contract=ROUTES, cut=("options",)), "'options' must not be cut"),
        (lambda: Agent(prompt="{options}", contract=Thinking(ROUTES)), "a choice is one token, before which nothing can be thought"),
        (lambda: ROUTES.offered({"options": 3}), "options = 3: pass the names that are offered"),
        (lambda: ROUTES.offered({"options": []}), r"options = \[\]: offer one option at least"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(make: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        make()


def test_a_label_that_is_no_single_token_is_refused(tiny_model: Path) -> None:
    class Split(ChatTokenizer):
        def encode(self, text: str) -> list[int]:
            return [1, 2]

    tokens = ROUTES.tokens(["look", "stop"], ChatTokenizer(tiny_model))
    assert list(tokens) == ["look", "stop"] and len(set(tokens.values())) == 2
    with pytest.raises(ValueError, match="option 'stop' is called 'C', which is 2 tokens for the model in"):
        ROUTES.tokens(["stop"], Split(tiny_model))

    class Unknown(ChatTokenizer):
        def encode(self, text: str) -> list[int]:
            return [40]

    with pytest.raises(ValueError, match="option 'look' is called 'B', which is a token of "):
        ROUTES.tokens(["look"], Unknown(tiny_model))


def test_the_prompt_of_a_choice_leaves_room_for_the_question_of_its_message(tiny_model: Path) -> None:
    class Long(Routed):
        router = Agent(prompt="Notes: {notes}\n{options}", contract=ROUTES, max_tokens=30, cut=("notes",))

        async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
            reply = await agents.router(notes="n" * 400, options=["ask", "stop"])
            return Outcome(answer=str(reply["message"]))

    says = iter(["ask", "what?"])
    tokenizer = ChatTokenizer(tiny_model)
    answering = saying(lambda _: next(says), tokenizer)
    trace = play(Long(), answering, task=TASK, tokenizer=tokenizer, max_model_len=160, max_tokens=30)
    assert (trace.status, trace.answer) == (EpisodeStatus.OK, "what?"), trace.error
    assert trace.turns[0].cut["notes"] > 0 and len(trace.turns[1].prompt_token_ids) <= 130


def test_what_an_offer_was_made_from_is_a_parent() -> None:
    class Offering(Routed):
        async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
            named = await agents.solver(message="which?")
            reply = await agents.router(question=task.prompt, options=[named.text, "stop"])
            return Outcome(answer=str(reply["choice"]))

    says = iter(["look", "stop"])
    trace = play(Offering(), saying(lambda _: next(says)), task=TASK)
    assert trace.answer == "stop" and trace.turns[1].parents == (0,)


def test_a_choice_is_one_token_and_a_message_a_turn_that_continues_it(tiny_model: Path) -> None:
    trace = routed(tiny_model, {"router": ["ask", "what is it?", "stop"], "solver": ["4"]})
    assert (trace.status, trace.answer, trace.stop_reason) == (EpisodeStatus.OK, "4", "stop"), trace.error
    chosen, message, solved, last = trace.turns
    tokenizer = ChatTokenizer(tiny_model)
    ids = [tokenizer.encode(label)[0] for label in "ABC"]
    assert list(chosen.completion_token_ids) == ids[:1] and list(last.completion_token_ids) == ids[2:]
    assert json.loads(chosen.sampling.constraint) == {"allowed_token_ids": ids}
    assert json.loads(last.sampling.constraint) == {"allowed_token_ids": ids[1:]}
    assert (chosen.sampling.max_tokens, message.sampling.max_tokens, message.sampling.constraint) == (1, 30, "")
    assert {t.finish_reason for t in trace.turns} == {FinishReason.STOP} and all(t.is_format_ok for t in trace.turns)
    conversation = [
        {"role": "user", "content": chosen.prompt_text},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "Write the message for ask."},
    ]
    assert list(message.prompt_token_ids) == tokenizer.encode_chat(conversation)
    assert message.parents == (chosen.turn_index,) and message.turn_index in solved.parents
    assert solved.prompt_text == "Solve: what is it?"


def test_a_choice_that_is_not_offered_or_cannot_be_written_is_the_authors_fault(tiny_model: Path) -> None:
    for offered, wanted in (
        ({"options": ["sing"]}, "agent 'router': options = "),
        ({"options": []}, "offer one option"),
    ):
        trace = routed(tiny_model, {"router": ["stop"]}, **offered)
        assert trace.cause is Cause.AUTHOR and wanted in trace.error, trace.error
    trace = routed(tiny_model, {"router": ["ask"]}, options=["look", "stop"])
    assert trace.cause is Cause.AUTHOR
    assert "agent 'router' was to choose 'ask': offered are look, stop" in trace.error


def test_an_episode_without_an_engine_chooses_by_name() -> None:
    trace = play_scripted(Routed(), TASK, {"router": ["look"], "solver": []})
    assert (trace.status, trace.stop_reason, trace.turns[0].completion_text) == (EpisodeStatus.OK, "look", "B")


def test_a_choice_is_resampled_with_everything_before_it_replayed(tiny_model: Path) -> None:
    says = {"router": ["ask", "what is it?", "stop"], "solver": ["4"]}
    base = routed(tiny_model, says, logprobs=[-0.5, -1.0, -3.0])
    script = Script(kind="counterfactual", agent="router", base=base, changed_at=base.turns[-1].turn_index)
    other = routed(tiny_model, {"router": ["look"]}, script=script)
    assert (other.status, other.stop_reason) == (EpisodeStatus.OK, "look"), other.error
    for turn, again in zip(base.turns[:-1], other.turns[:-1], strict=True):
        assert (again.completion_text, again.sampling) == (turn.completion_text, turn.sampling)
        assert again.option_logprobs == turn.option_logprobs
    assert other.turns[0].option_logprobs == {"ask": -0.5, "look": -1.0, "stop": -3.0}
    silent = routed(tiny_model, {"solver": ["4"]}, script=Script(kind="without", agent="router", base=base))
    assert (silent.status, silent.stop_reason) == (EpisodeStatus.OK, "")
    assert not silent.turns[0].is_format_ok and list(silent.turns[0].completion_token_ids) == []


def test_the_distribution_over_options_is_stored(tiny_model: Path) -> None:
    trace = routed(tiny_model, {"router": ["look"]}, logprobs=[-1.0, -0.75, -1.5])
    assert trace.turns[0].option_logprobs == {"ask": -1.0, "look": -0.75, "stop": -1.5}
    (batch,) = episode_table([trace]).to_batches()
    (stored,) = traces_of(batch)
    assert stored.turns[0].option_logprobs == trace.turns[0].option_logprobs
    assert stored.turns[0].sampling == trace.turns[0].sampling


def routed(
    folder: Path,
    says: dict[str, list[str]],
    *,
    script: Script | None = None,
    logprobs: list[float] | None = None,
    **offered: Any,
) -> Trace:
    """An episode in which each agent says the next of its texts."""
    left = {name: iter(texts) for name, texts in says.items()}

    tokenizer = ChatTokenizer(folder)
    answering = saying(lambda call: next(left[call.agent]), tokenizer, allowed_logprobs=logprobs or ())
    return play(
        Routed(**offered), answering, task=TASK, tokenizer=tokenizer, max_model_len=256, max_tokens=30, script=script
    )
