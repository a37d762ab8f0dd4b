"""The recorder: what a workflow does becomes a trace, whatever happens in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import one_group
import pytest
from one_group import saying, start
from pair import Pair
from waits import until

from serve_apps.authoring.agent import Agent, Tool, ToolError, ToolFault, count_attempt
from serve_apps.authoring.workflow import Outcome, Workflow, load_workflow, together
from serve_apps.chat.tokenizer import ChatTokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.scripted import play_saying
from serve_apps.episode.team import AgentCall
from serve_apps.policy.client import PolicyCallError
from stores.traces.rows import episode_table, traces_of
from stores.types import Cause, Completion, EpisodeStatus, FinishReason, Task, Trace
from tests.small_tokenizers import NO_THOUGHT, QWEN, SWITCH, build

pytestmark = pytest.mark.fast

LIMITS = EpisodeConfig(turn_timeout_s=5, episode_timeout_s=10, max_attempts=3)


async def _double(number: str) -> str:
    if number == "0":
        raise ToolError("zero is not allowed")
    return str(2 * int(number))


PAIR = Pair(Tool(_double, timeout_s=1))


class Broken(Workflow):
    """Raises after its first turn."""

    writer = Agent(prompt="Compute {question}")

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        reply = await agents.writer(question=task.prompt)
        return Outcome(answer=reply["no such field"])


class Slow(Workflow):
    """Never ends."""

    writer = Agent(prompt="Compute {question}")

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        await agents.writer(question=task.prompt)
        await asyncio.sleep(60)
        return Outcome(answer="")


class Returns(Workflow):
    """Ends with what it is made with."""

    writer = Agent(prompt="Compute {question}")

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    async def run(self, task: Task, agents: Any, tools: Any) -> Any:
        if isinstance(self.returned, BaseException):
            raise self.returned
        return self.returned


class Cancels(Workflow):
    """Waits for what it has cancelled."""

    writer = Agent(prompt="Compute {question}")

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        draft = asyncio.ensure_future(agents.writer(question=task.prompt))
        draft.cancel()
        return Outcome(answer=(await draft)["text"])


def one(call: AgentCall) -> str:
    return "<ANSWER>1</ANSWER>"


def play(
    workflow: Workflow,
    says: Callable[[AgentCall], str] = one,
    *,
    limits: EpisodeConfig = LIMITS,
    answer: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Trace:
    """Args: answer: see `saying`."""
    return one_group.play(
        workflow, saying(says, **answer), limits=limits, **({"max_model_len": 256, "max_tokens": 32} | settings)
    )


def test_turns_and_tool_calls_are_recorded_with_what_they_read_from() -> None:
    trace = play(PAIR, lambda call: "<ANSWER>12</ANSWER>")
    assert (trace.status, trace.answer) == (EpisodeStatus.OK, "12")
    writer, reader = trace.turns
    assert [t.turn_index for t in trace.turns] == [0, 2]
    assert (writer.parents, trace.tool_calls[0].parents, reader.parents) == ((), (0,), (0, 1))
    assert trace.tool_calls[0].response == "24"
    assert "after 24" in reader.prompt_text


def test_a_turn_is_token_exact(tiny_model: Path) -> None:
    tokenizer = ChatTokenizer(tiny_model)
    says = saying(lambda call: "<ANSWER>12</ANSWER>", tokenizer)
    turn = one_group.play(PAIR, says, tokenizer=tokenizer, max_model_len=256).turns[0]
    assert list(turn.prompt_token_ids) == tokenizer.encode_chat([{"role": "user", "content": "Compute 3 * 4"}])
    assert turn.completion_token_ids[-1] == tokenizer.eos_id
    assert turn.completion_text == "<ANSWER>12</ANSWER>"
    assert len(turn.rollout_logprobs) == len(turn.completion_token_ids)


def test_the_variables_of_an_agents_template_are_in_its_prompts_and_in_no_others(tmp_path: Path) -> None:
    folder = build("qwen", tmp_path / "qwen")
    (folder / "chat_template.jinja").write_text(QWEN + SWITCH)
    tokenizer = ChatTokenizer(folder)
    says = saying(lambda call: "<ANSWER>12</ANSWER>", tokenizer)
    kwargs = {"writer": {"enable_thinking": False}}
    writer, reader = one_group.play(PAIR, says, tokenizer=tokenizer, chat_template_kwargs=kwargs).turns
    asked = [{"role": "user", "content": "Compute 3 * 4"}]
    reference = tokenizer.hugging_face.apply_chat_template(
        asked, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert reference.endswith(NO_THOUGHT)
    assert list(writer.prompt_token_ids) == tokenizer.encode(reference)
    assert not tokenizer.decode(reader.prompt_token_ids).endswith(NO_THOUGHT)


def test_the_same_episode_has_the_same_key_and_seeds_and_another_index_has_others() -> None:
    one, again, other = (play(PAIR, index=i) for i in (0, 0, 1))
    assert (one.episode_id, one.turns[1].seed) == (again.episode_id, again.turns[1].seed)
    assert one.episode_id != other.episode_id
    assert one.turns[0].seed != other.turns[0].seed
    assert one.turns[0].seed != one.turns[1].seed
    assert one.group_id == other.group_id


def test_a_workflow_that_raises_is_an_agent_error_and_keeps_its_turns() -> None:
    trace = play(Broken(), lambda call: "hm")
    assert trace.status is EpisodeStatus.AGENT_ERROR
    assert "no such field" in trace.error
    assert len(trace.turns) == 1


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("12", "TypeError: run returned str, not an Outcome"),
        (Outcome(answer="12", metadata=None), "TypeError: Outcome.metadata is NoneType, not a mapping"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_an_outcome_that_is_none_is_an_agent_error(returned: Any, said: str) -> None:
    trace = play(Returns(returned), lambda call: "hm")
    assert trace.status is EpisodeStatus.AGENT_ERROR
    assert said in trace.error


class InAGroup(Workflow):
    """Two calls side by side, as Python's own groups of tasks run them."""

    writer = Agent(prompt="Compute {question}")

    def __init__(self, question: str = "1") -> None:
        self.question = question

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(agents.writer(question=self.question))
        return Outcome(answer="")


def test_what_a_group_of_tasks_raises_is_the_error_that_came_first() -> None:
    full = play(InAGroup("x" * 2000))
    assert (full.status, full.stop_reason, full.cause) == (EpisodeStatus.TRUNCATED, "context_exhausted", Cause.NONE)

    def dies(call: AgentCall) -> str:
        raise PolicyCallError("replica died")

    lost = play(InAGroup(), dies)
    assert (lost.status, lost.error, lost.cause) == (EpisodeStatus.INFRA_ERROR, "replica died", Cause.INFRASTRUCTURE)
    ends = play(Returns(BaseExceptionGroup("two", [BaseExceptionGroup("one", [SystemExit(3)])])))
    assert (ends.status, ends.error, ends.cause) == (EpisodeStatus.AGENT_ERROR, "SystemExit: 3", Cause.AUTHOR)


async def _asks_two(number: str) -> str:
    async def ask() -> None:
        raise ToolFault("503")

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        group.create_task(ask())
    return number


def test_a_service_that_fails_in_a_tools_group_of_tasks_is_the_infrastructures_fault() -> None:
    trace = play(Pair(Tool(_asks_two)))
    assert (trace.error, trace.stop_reason) == ("tool 'double': 503", "tool_failed")
    assert trace.cause is Cause.INFRASTRUCTURE


class Wordless(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise AttributeError("no such attribute")


async def _wordless(number: str) -> str:
    raise Wordless


async def _refuses(number: str) -> str:
    raise ToolError


async def _late(number: str) -> str:
    raise TimeoutError("no answer of the service after 0.1 s")


def test_an_error_without_words_is_recorded_by_its_name() -> None:
    assert play(Returns(Wordless())).error == "Wordless: "
    assert play(Returns(ToolError())).error == "ToolError"
    for function, error in ((_wordless, "Wordless: "), (_refuses, "ToolError")):
        trace = play(Pair(Tool(function)))
        assert (trace.status, trace.tool_calls[0].error) == (EpisodeStatus.TOOL_ERROR, error)
        assert trace.error == f"tool 'double': {error}"


def test_a_tool_that_is_late_by_its_own_clock_says_so_itself() -> None:
    trace = play(Pair(Tool(_late, timeout_s=7)))
    assert trace.tool_calls[0].error == "TimeoutError: no answer of the service after 0.1 s"
    assert trace.cause is Cause.INFRASTRUCTURE


def test_an_outcome_is_stored_whatever_its_values_are() -> None:
    metadata = {"votes": {(1, 2): 3}, "text": "half a pair \ud83d"}
    trace = play(Returns(Outcome(answer=12, stop_reason=7, metadata=metadata)), lambda call: "hm")
    assert (trace.status, trace.answer, trace.stop_reason) == (EpisodeStatus.OK, "12", "7")
    (stored,) = traces_of(episode_table([trace]).to_batches()[0])
    assert stored.outcome_metadata == {"votes": "{(1, 2): 3}", "text": repr("half a pair \ud83d")}


def test_a_task_that_the_workflow_cancelled_is_its_error_and_a_cancelled_episode_is_none() -> None:
    trace = play(Cancels(), lambda call: "hm")
    assert trace.status is EpisodeStatus.AGENT_ERROR
    assert "a task that it had cancelled itself" in trace.error

    async def cancelled() -> None:
        asked: list[AgentCall] = []
        episode = asyncio.ensure_future(start(Slow(), saying(lambda call: asked.append(call) or "hm")))
        await until(lambda: asked)
        episode.cancel()
        await episode

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_tool_that_fails_is_a_tool_error() -> None:
    trace = play(PAIR, lambda call: "<ANSWER>0</ANSWER>")
    assert trace.status is EpisodeStatus.TOOL_ERROR
    assert trace.tool_calls[0].error == "zero is not allowed"


def test_a_tool_that_gets_nonsense_is_a_tool_error() -> None:
    trace = play(PAIR, lambda call: "<ANSWER>twelve</ANSWER>")
    assert trace.status is EpisodeStatus.TOOL_ERROR
    assert "invalid literal" in trace.error


def test_an_episode_without_end_is_a_timeout() -> None:
    limits = EpisodeConfig(turn_timeout_s=1, episode_timeout_s=2)
    trace = play(Slow(), lambda call: "hm", limits=limits)
    assert trace.status is EpisodeStatus.TIMEOUT
    assert "1 turns done" in trace.error


def test_a_cut_completion_makes_the_episode_truncated_and_the_turn_a_format_fault() -> None:
    trace = play(PAIR, answer={"finish_reason": FinishReason.LENGTH})
    assert trace.status is EpisodeStatus.TRUNCATED
    assert not trace.turns[0].is_format_ok


def test_a_prompt_longer_than_the_context_is_a_typed_stop() -> None:
    trace = play(PAIR, max_model_len=8)
    assert (trace.status, trace.stop_reason) == (EpisodeStatus.TRUNCATED, "context_exhausted")
    assert "the context holds 8" in trace.error


class Reads(Workflow):
    """Asks with a text that may be cut."""

    reader = Agent(prompt="Read {found} and answer {question}", cut=("found",))

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        reply = await agents.reader(found="red green blue " * 200, question=task.prompt)
        return Outcome(answer=reply.text)


def test_what_was_cut_from_a_prompt_is_in_the_stored_turn() -> None:
    trace = play(Reads(), lambda call: "12", max_model_len=128)
    (turn,) = trace.turns
    assert turn.prompt_text.startswith("Read red") and turn.prompt_text.endswith("and answer 3 * 4")
    assert turn.cut["found"] > 1000
    (stored,) = traces_of(episode_table([trace]).combine_chunks().to_batches()[0])
    assert stored.turns[0].cut == turn.cut


def test_an_agent_that_may_fill_the_context_leaves_half_of_it_to_the_prompt() -> None:
    trace = play(Reads(), lambda call: "12", max_model_len=128, max_tokens=512)
    (turn,) = trace.turns
    assert "red" in turn.prompt_text and len(turn.prompt_token_ids) <= 64


class Waits(Workflow):
    """Gives a tool less time than the tool gives itself."""

    reader = Agent(prompt="Read {question}")

    def __init__(self) -> None:
        self.tools = {"again": Tool(self._again), "slow": Tool(self._slow)}

    async def _again(self) -> str:
        for _ in range(3):
            count_attempt()
        return "third time"

    async def _slow(self) -> str:
        await asyncio.sleep(30)
        return ""

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        value = await tools.again()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await tools.slow()
        return Outcome(answer=value)


def test_a_tools_attempts_and_a_call_that_was_given_up_are_recorded() -> None:
    trace = play(Waits(), lambda call: "12")
    assert (trace.status, trace.answer) == (EpisodeStatus.OK, "third time")
    assert [(c.tool, c.num_attempts) for c in trace.tool_calls] == [("again", 3), ("slow", 1)]
    assert trace.tool_calls[1].error.startswith("given up after ")


class SideBySide(Workflow):
    """Two agents at once, begun in either order."""

    one = Agent(prompt="Read {question}")
    other = Agent(prompt="Read {question}")

    def __init__(self, *names: str) -> None:
        self.order = names

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        await together(*(agents[name](question=task.prompt) for name in self.order))
        return Outcome(answer="")


class Notebook(Workflow):
    """Hands a tool the list that it goes on writing into, and the tool answers with a list of its own, of which the same is true."""

    writer = Agent(prompt="Say {text}")

    def __init__(self) -> None:
        pages: list[list[str]] = []

        async def kept(notes: list[str]) -> list[list[str]]:
            pages.append(notes)
            return pages

        self.tools = {"kept": Tool(kept)}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        notes: list[str] = []
        for text in ("a", "b"):
            notes.append((await agents.writer(text=text))["text"])
            await tools.kept(notes=notes)
        return Outcome(answer="")


def test_a_tool_call_is_recorded_as_it_was_made_whatever_becomes_of_its_lists() -> None:
    calls = play(Notebook(), lambda call: call.inputs["text"]).tool_calls
    assert [call.request["notes"] for call in calls] == [["a"], ["a", "b"]]
    assert [call.response for call in calls] == [[["a"]], [["a"], ["a", "b"]]]


def test_seeds_do_not_depend_on_who_came_first() -> None:
    seeds = [
        {t.agent: t.seed for t in play(SideBySide(*names), lambda call: "12").turns}
        for names in (("one", "other"), ("other", "one"))
    ]
    assert seeds[0] == seeds[1] and len({*seeds[0].values()}) == 2


def test_what_another_call_answers_meanwhile_was_not_read() -> None:
    other_is_asked, one_has_answered = asyncio.Event(), asyncio.Event()
    says = saying(lambda call: "the sum of 3 and 4")

    async def complete(call: AgentCall) -> Completion:
        if call.agent == "other":
            other_is_asked.set()
            await one_has_answered.wait()
        else:
            await other_is_asked.wait()
            asyncio.get_running_loop().call_soon(one_has_answered.set)
        return await says(call)

    task = Task(task_id="t", prompt="What is the sum of 3 and 4?", answers=("7",))
    assert [turn.parents for turn in one_group.play(SideBySide("one", "other"), complete, task=task).turns] == [(), ()]


class Plays(Workflow):
    """Plays on the board that its task begins with."""

    player = Agent(prompt="The board is {board}")

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        task.metadata["board"][0].append((await agents.player(board=task.metadata["board"]))["text"])
        return Outcome(answer=str(task.metadata["board"]))


def test_each_episode_of_a_task_begins_with_the_task_as_it_is_written() -> None:
    task = Task(task_id="t", prompt="play", answers=("x",), metadata={"board": [[], []]})
    traces = [one_group.play(Plays(), saying(lambda call: "x"), task=task, index=i) for i in range(2)]
    assert [trace.answer for trace in traces] == ["[['x'], []]"] * 2
    assert [trace.task.metadata["board"] for trace in traces] == [[[], []]] * 2


class LeavesBehind(Workflow):
    """Two branches at once, of which one fails, or is not waited for; the other is in a tool that does not answer, or about to call it."""

    writer = Agent(prompt="Compute {question}")

    def __init__(self, *, fails: bool, sleeps: bool) -> None:
        self.fails, self.sleeps = fails, sleeps
        self.over, self.asked = asyncio.Event(), list[str]()

        async def silent(text: str) -> str:
            self.asked.append(text)
            return str(await asyncio.Event().wait())

        self.tools = {"silent": Tool(silent)}

    async def branch(self, tools: Any) -> None:
        if self.sleeps:
            await self.over.wait()
        await tools.silent(text="x")

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        left = asyncio.ensure_future(self.branch(tools))
        while not (self.sleeps or self.asked):
            await asyncio.sleep(0)
        await agents.writer(question=task.prompt)
        if self.fails:
            await asyncio.gather(left, agents.writer(wrong="input"))
        return Outcome(answer="12")


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("sleeps", [True, False])
def test_what_a_workflow_leaves_behind_ends_with_its_episode(fails: bool, sleeps: bool) -> None:
    async def left() -> set[str]:
        workflow = LeavesBehind(fails=fails, sleeps=sleeps)
        trace = await start(workflow, saying(lambda call: "12"))
        assert trace.status is (EpisodeStatus.AGENT_ERROR if fails else EpisodeStatus.OK)
        workflow.over.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert workflow.asked == ([] if sleeps else ["x"])
        return {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}}

    assert asyncio.run(left()) == set()


class ReadsSeveral(Workflow):
    """Calls one agent for each of several texts at once."""

    reader = Agent(prompt="Summarize {text}", max_tokens=8)

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        await together(*(agents.reader(text=f"{k}{'x' * length}") for k, length in enumerate((400_000, 30_000, 9))))
        return Outcome(answer="")


def test_calls_of_one_agent_side_by_side_are_numbered_in_their_order_however_long_they_take_to_read() -> None:
    trace = play_saying(ReadsSeveral(), Task(task_id="t", prompt="q", answers=()), lambda call: "so")
    turns = sorted(trace.turns, key=lambda turn: turn.turn_index)
    assert [turn.prompt_text.split()[1][0] for turn in turns] == ["0", "1", "2"]
    assert [turn.round_index for turn in turns] == [0, 1, 2]


def test_an_infrastructure_failure_is_an_attempt_with_the_same_seed() -> None:
    seeds: list[int] = []

    def says(call: AgentCall) -> str:
        seeds.append(call.request.seed)
        if len(seeds) == 1:
            raise PolicyCallError("replica died")
        return "<ANSWER>1</ANSWER>"

    trace = play(PAIR, says)
    assert (trace.status, trace.attempt) == (EpisodeStatus.OK, 2)
    assert seeds[0] == seeds[1]


def test_an_infrastructure_failure_that_stays_is_recorded_as_such() -> None:
    def says(call: AgentCall) -> str:
        raise PolicyCallError("replica died")

    trace = play(PAIR, says)
    assert (trace.status, trace.attempt, trace.turns) == (EpisodeStatus.INFRA_ERROR, 3, ())


@pytest.mark.parametrize("version", [lambda call: len(call.inputs) + 2, lambda call: 0], ids=["second turn", "all"])
def test_an_episode_that_another_version_acted_in_is_an_infrastructure_failure_and_marked(
    version: Callable[[AgentCall], int],
) -> None:
    trace = play(PAIR, answer={"version": version})
    assert (trace.status, trace.attempt, trace.is_version_mixed) == (EpisodeStatus.INFRA_ERROR, 3, True)
    assert f"version {trace.turns[-1].policy_version} of model group 'g' answered, 3 should act" in trace.error


def test_an_episode_is_repeated_where_a_replica_with_another_version_answered_once() -> None:
    answered = iter([0, 3, 3])
    trace = play(PAIR, answer={"version": lambda call: next(answered)})
    assert (trace.status, trace.attempt, trace.is_version_mixed) == (EpisodeStatus.OK, 2, False)
    assert [turn.policy_version for turn in trace.turns] == [3, 3]


class Counts(Workflow):
    """Gives its agent a number. Args: unnamed: an input without its name."""

    writer = Agent(prompt="Attempt {number:02d}")

    def __init__(self, *unnamed: str) -> None:
        self.unnamed = unnamed

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        await agents.writer(*self.unnamed, number=7)
        return Outcome(answer="")


def test_an_input_may_be_a_number_and_needs_its_name() -> None:
    assert play(Counts()).turns[0].prompt_text == "Attempt 07"
    assert "'writer' was called with 'seven': give every input its name" in play(Counts("seven")).error


@pytest.mark.parametrize("inputs", [{}, {"question": "1", "extra": "2"}])
def test_a_call_with_the_wrong_inputs_names_them(inputs: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"missing|extra"):
        Agent(prompt="Compute {question}").messages(inputs)


class Taken(Workflow):
    """Calls an agent as `agents` calls the episode."""

    episode = Agent(prompt="Compute {question}")


def test_a_name_that_agents_have_themselves_is_refused() -> None:
    with pytest.raises(ValueError, match=r"declares 'episode', a name that .* call it something else"):
        load_workflow(f"{__name__}:Taken", {})
