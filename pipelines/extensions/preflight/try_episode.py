"""try_episode: a run config -> one episode against a model that says what agents must say, and what came of it, line by line.

It shows whether a program starts and finds its model, whether prompts take their inputs and whether the credit rule can read an episode:
before engines are started.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from pipelines.config.run_config import RunConfig
from pipelines.credit.rule import load_credit, score_trace
from pipelines.tasks.sources import iter_tasks
from serve_apps.authoring.agent import AuthorError
from serve_apps.authoring.contracts import Boxed, Contract, JsonKeys, OneOf, Tags, Thinking
from serve_apps.authoring.workflow import Workflow, load_workflow
from serve_apps.chat.tokenizer import ChatTokenizer, load_tokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.scripted import play_saying
from serve_apps.episode.team import AgentCall
from stores.by_name import open_by_name
from stores.types import SOUND, Task, Trace

MAX_TEXT = 200
"""Characters of a prompt's end or an answer that are shown."""


class TriedEpisodeFailed(ValueError):
    """The episode did not come to its end; the message says why."""


def try_episode(config: RunConfig) -> Iterator[str]:
    """Plays the first training task once and yields lines about it; TriedEpisodeFailed where it did not come to its end."""
    workflow = load_workflow(config.workflow.path, config.workflow.settings)
    task = next(iter_tasks(config.tasks.train, section="train", seed=config.seed))
    yield f"task {task.task_id}: {_short(task.prompt)}"
    trace = play(config, workflow, task, config.collect.episode)
    yield from _shown(trace)
    if trace.status not in SOUND:
        raise TriedEpisodeFailed(f"the episode ended with {trace.status.value}: {trace.error}")
    credit = score_trace(load_credit(config.credit), trace, version="tried")
    rewards = ", ".join(f"turn {reward.turn_index} {reward.reward:.3g}" for reward in credit.rewards)
    beyond = "" if 0 <= credit.outcome <= 1 else ", which is beyond [0, 1]: accuracy and floors expect a share"
    yield f"credit: outcome {credit.outcome:.3g}{beyond}; rewards: {rewards or 'none'}"


def play(config: RunConfig, workflow: Workflow, task: Task, limits: EpisodeConfig) -> Trace:
    """Plays a task once, against a model that says what agents must say."""
    tokenizer = _tokenizer(config)
    return play_saying(
        workflow,
        task,
        _speaker(config, workflow),
        tokenizer=tokenizer,
        max_model_len=1 << 20 if tokenizer is None else config.serve.max_model_len,
        limits=limits.model_copy(update={"max_attempts": 1}),
    )


def _tokenizer(config: RunConfig) -> ChatTokenizer | None:
    """The tokenizer of the first model folder that is on this machine; None where there is none yet."""
    for group in config.model_groups.values():
        if group.model and Path(group.model, "tokenizer.json").is_file():
            return load_tokenizer(group.model)
    return None


def _speaker(config: RunConfig, workflow: Workflow) -> Callable[[AgentCall], str]:
    """Says what the demonstrator of the warm start would, or else the shortest text that fits an agent's contract."""
    if config.warmstart is None or not config.warmstart.demonstrator:
        return lambda call: example_of(workflow.agents[call.agent].contract)
    name = config.warmstart.demonstrator
    demonstrator = open_by_name(name, place="warmstart.demonstrator")
    dice = random.Random(config.seed)

    def demonstrated(call: AgentCall) -> str:
        try:
            return str(demonstrator(call.agent, call.task, call.inputs, dice))
        except Exception as error:
            raise AuthorError(
                f"warmstart.demonstrator {name!r} raised {type(error).__name__}: {error}: where it was written "
                "for other tasks, name one for these, or begin with a model (`warmstart: null`)"
            ) from error

    return demonstrated


def example_of(contract: Contract) -> str:
    """Returns a short text without a fault in its format, for the contracts of `serve_apps.authoring.contracts`; "0" for others."""
    match contract:
        case Tags(names=names, choices=choices):
            return "".join(f"<{name}>{choices.get(name, ('0',))[0]}</{name}>" for name in names)
        case OneOf(names=names):
            return f"<{names[-1]}>0</{names[-1]}>"
        case Thinking(contract=inner):
            return f"<think>hm</think>{example_of(inner)}"
        case Boxed():
            return r"\boxed{0}"
        case JsonKeys(names=names):
            return "{" + ", ".join(f'"{name}": "0"' for name in names) + "}"
        case _:
            return "0"


def _shown(trace: Trace) -> Iterator[str]:
    events: list[tuple[int, str]] = []
    for turn in trace.turns:
        fault = f"; format: {turn.format_fault}" if turn.format_fault else ""
        size = f"{len(turn.prompt_token_ids)} + {len(turn.completion_token_ids)} tokens"
        text = (
            f"{turn.agent} ({size}{fault}): ...{_short(turn.prompt_text[-MAX_TEXT:])} -> {_short(turn.completion_text)}"
        )
        events.append((turn.turn_index, text))
    for call in trace.tool_calls:
        answer = f"error {call.error}" if call.error else _short(str(call.response))
        events.append((call.call_index, f"tool {call.tool} {_short(str(dict(call.request)))} -> {answer}"))
    yield from (f"{index}  {text}" for index, text in sorted(events))
    yield f"{trace.status.value}, {trace.stop_reason or 'no stop reason'}; answer: {_short(trace.answer)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
