"""scripted: a workflow, a task and written completions -> the trace of one episode, with no model and no engine.

For tests of workflows and credit rules: the real runner and the real output contracts, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_apps.authoring.workflow import Workflow
from serve_apps.chat.tokenizer import READY, ChatTokenizer, PromptSettings
from serve_apps.config import EpisodeConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import ActingTeam, AgentCall
from serve_apps.episode_spec import EpisodeSpec, Script
from serve_apps.own_loop import result_of
from stores.types import Completion, FinishReason, Purpose, Task, Trace

GROUP = "scripted"
"""The model group of every agent in a scripted episode."""


def play_scripted(workflow: Workflow, task: Task, completions: Mapping[str, Sequence[str]]) -> Trace:
    """Plays one episode in which the n-th call of an agent is answered by the n-th of its completions.

    What the workflow raises is recorded in the trace (`status`, `error`), as in training.

    Args:
        completions: texts by the agent's name. Those that are not asked for are ignored.

    Raises:
        ValueError: for a name that is no agent of the workflow, and for an agent that is called more often than it has
            completions.
    """
    unknown = sorted(completions.keys() - workflow.agents.keys())
    if unknown:
        raise ValueError(f"completions of {unknown}: the workflow's agents are {sorted(workflow.agents)}")
    num_calls = dict.fromkeys(workflow.agents, 0)

    def say(call: AgentCall) -> str:
        num_calls[call.agent] += 1
        texts = completions.get(call.agent, ())
        return texts[num_calls[call.agent] - 1] if num_calls[call.agent] <= len(texts) else ""

    trace = play_saying(workflow, task, say)
    for name, number in num_calls.items():
        if number > len(completions.get(name, ())):
            raise ValueError(
                f"agent {name!r} was called {number} times and has {len(completions.get(name, ()))} completions: "
                "add the missing ones"
            )
    return trace


def play_saying(
    workflow: Workflow,
    task: Task,
    say: Callable[[AgentCall], str],
    *,
    tokenizer: ChatTokenizer | None = None,
    max_model_len: int = 1 << 20,
    limits: EpisodeConfig = EpisodeConfig(max_attempts=1),
    script: Script | None = None,
) -> Trace:
    """Plays one episode in which a function says what the model would.

    What the workflow raises is recorded in the trace, as in training.

    Args:
        tokenizer: None: a token is a byte.
        script: what is played again, and what is changed.
    """
    is_limited = tokenizer is not None  # limits are for tokens, of which a text has fewer than bytes
    tokenizer = tokenizer or ByteTokenizer()

    async def complete(call: AgentCall) -> Completion:
        ids = call.written(say(call), tokenizer)
        ids = ids[: call.request.sampling.max_tokens] if is_limited else ids
        reason = FinishReason.STOP if call.options or ids[-1] in tokenizer.end_ids else FinishReason.LENGTH
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason=reason, policy_version=0)

    team = ActingTeam(
        workflow=workflow,
        workflow_path=f"{type(workflow).__module__}:{type(workflow).__name__}",
        group_of=dict.fromkeys(workflow.agents, GROUP),
        tokenizers={GROUP: tokenizer},
        max_model_len={GROUP: max_model_len},
        sampling={name: agent.sampling for name, agent in workflow.agents.items()},
        policy_versions={GROUP: 0},
        team_key="scripted",
    )
    spec = EpisodeSpec(
        run_id="scripted",
        iteration=1,
        purpose=Purpose.TRAIN,
        team_key="scripted",
        task=task,
        episode_index=0,
        run_seed=0,
        script=script,
    )
    return result_of(run_episode(spec, team=team, complete=complete, limits=limits))


class ByteTokenizer(ChatTokenizer):
    """One token per byte of UTF-8, and one that ends a completion."""

    def __init__(self) -> None:
        """Makes a tokenizer that needs no model folder."""
        self.end_ids, self.turn_ids = frozenset({self.eos_id}), frozenset()

    @property
    def chat_template(self) -> str:
        """Says that it has tools, and calls in the format of Hermes."""
        return "tools <tool_call>"

    def most_characters(self, num_tokens: int) -> int | None:
        """As many as tokens: a character has one byte at least."""
        return num_tokens

    def known_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """No variable: it has no template."""
        return {}

    def mark_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: PromptSettings = READY,
    ) -> str:
        """The messages, one after another, each after its role."""
        return "".join(f"{message['role']}\n{message['content']}\n" for message in messages)

    def encode_marked(self, marked: str) -> list[int]:
        """The bytes of the text: none of them is a control token."""
        return self.encode(marked)

    def plain(self, marked: str) -> str:
        """The text itself: nothing in it is masked."""
        return marked

    def mark_completion(self, token_ids: Sequence[int]) -> str:
        """The text of a completion."""
        return self.decode(token_ids)

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def encode_completion(self, text: str) -> list[int]:
        """The bytes of a completion, and the token that ends it."""
        return [*self.encode(text), self.eos_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of bytes; the end token has none."""
        return bytes(token for token in token_ids if token != self.eos_id).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """The text of one byte; a byte that is no character becomes the replacement character."""
        return self.decode([token_id])

    @property
    def eos_id(self) -> int:
        """The first number that is no byte."""
        return 256
