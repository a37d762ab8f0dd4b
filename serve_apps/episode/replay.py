"""replay: a finished episode and a change -> the completions and tool responses with which it is run again.

    before the change   the recorded turns, token for token, and the recorded tool responses; worlds are played again, and compared
    the change          greedy: every turn at temperature 0    counterfactual: one turn sampled anew
                        without: one agent returns empty completions
    after it            live

A workflow must be deterministic: given the same replies it must make the same calls. A prompt that differs is a ReplayError.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from serve_apps.authoring.agent import AuthorError, Tool, ToolError
from serve_apps.episode_spec import Script
from serve_apps.worlds.seen import COMPARED
from stores.types import Completion, FinishReason, GenerateRequest, ToolCall

GIVEN_UP = "given up"
"""With this begins the recorded error of a tool call that the workflow cancelled."""


class ReplayError(AuthorError):
    """Raised where a workflow makes another call than in the episode that is run again."""


@dataclass(slots=True)
class Playback:
    """Runs a script once; remembers which of the recorded calls were made, by agent and by tool."""

    script: Script
    _rounds: dict[str, set[int]] = field(default_factory=dict)
    _calls: dict[str, set[int]] = field(default_factory=dict)
    _is_live: bool = False
    """Whether a call was answered live: prompts may be others from there on."""

    def round_of(self, agent: str, prompt_token_ids: Sequence[int], number: int) -> int:
        """Returns which of its own calls in the episode an agent's next call is: of those that the record has, the one with its prompt.

        Branches that run side by side may come in another order than in the record. Args: number: what it is without a record.
        """
        base = self.script.base
        if base is None:
            return number
        taken = self._rounds.setdefault(agent, set())
        left = [turn for turn in base.turns if turn.agent == agent and turn.round_index not in taken]
        prompt = list(prompt_token_ids)
        place = next((turn.round_index for turn in left if list(turn.prompt_token_ids) == prompt), None)
        if place is None:
            # After a live answer, calls of before the change may still come, and their places stay theirs.
            expected = {turn.round_index for turn in left if self._is_live and turn.turn_index < self.script.changed_at}
            place = next(n for n in count() if n not in taken | expected)
        taken.add(place)
        return place

    def take_back(self, agent: str, place: int) -> None:
        """Frees the place of a call that was given up, which its repetition takes."""
        self._rounds.get(agent, set()).discard(place)

    async def complete(
        self, agent: str, round_index: int, request: GenerateRequest, live: Callable[[], Awaitable[Completion]]
    ) -> Completion:
        """Returns the completion of an agent's turn; `live` samples one. Args: round_index: see `round_of`.

        Raises ReplayError where the prompt is not the recorded one.
        """
        base = self.script.base
        if base is None:
            return await live()
        turn = next((turn for turn in base.turns if (turn.agent, turn.round_index) == (agent, round_index)), None)
        if turn is not None and turn.turn_index < self.script.changed_at:
            if list(turn.prompt_token_ids) != list(request.prompt_token_ids):
                raise ReplayError(
                    f"turn {turn.turn_index} of {agent!r} has another prompt than in episode {base.episode_id}: the "
                    "workflow makes another call although all replies were the same"
                )
            return Completion(
                token_ids=turn.completion_token_ids,
                logprobs=turn.rollout_logprobs,
                finish_reason=turn.finish_reason,
                policy_version=turn.policy_version,
                is_version_mixed=turn.is_version_mixed,
                allowed_logprobs=tuple(turn.option_logprobs.values()),
            )
        self._is_live = True
        if self.script.kind == "without" and agent == self.script.agent:
            version = base.policy_versions[request.model_group]
            return Completion(token_ids=[], logprobs=[], finish_reason=FinishReason.STOP, policy_version=version)
        return await live()

    def check_stateless(self, name: str, tool: Tool) -> None:
        """Raises ReplayError for a tool that remembers: its responses before the change would be those of the record, and those after it
        of a tool that has not seen the calls before."""
        if tool.is_stateful and self.script.base is not None:
            raise ReplayError(
                f"tool {name!r} remembers its calls, so that an episode cannot be played again with another turn: declare an "
                "Environment instead"
            )

    def response(self, tool: str, request: Mapping[str, Any]) -> tuple[bool, Any]:
        """Returns whether the tool's call was recorded before the change with the same request, and its response; ToolError where it failed."""
        call = self._next_call(tool, request)
        if call is None or call.error.startswith(GIVEN_UP):
            return False, None
        if call.error:  # what the workflow did then, it does again
            raise ToolError(call.error)
        return True, call.response

    def compare(self, world: str, request: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
        """Raises ReplayError where a world shows something else than it did when the same call was recorded before the change."""
        call = self._next_call(world, request)
        if call is None or call.error:
            return
        differs = [name for name in COMPARED if call.response[name] != seen[name]]
        if differs:
            before, now = (str(one[differs[0]])[:80] for one in (call.response, seen))
            raise ReplayError(
                f"event {call.call_index}: the world {world!r} shows another {differs[0]} than in episode "
                f"{self.script.base.episode_id}, {now!r} instead of {before!r}: its settings and the actions so far must say "  # type: ignore[union-attr]
                "all that it does; give it a seed"
            )

    def _next_call(self, tool: str, request: Mapping[str, Any]) -> ToolCall | None:
        """Returns the record of the tool's next call with this request, if it was made before the change."""
        taken = self._calls.setdefault(tool, set())
        calls = [call for call in self.script.base.tool_calls if call.tool == tool] if self.script.base else []
        from stores.traces.rows import as_stored  # imports pyarrow, which a workflow that is only loaded does not need

        asked = as_stored(request)
        call = next((c for c in calls if c.call_index not in taken and as_stored(c.request) == asked), None)
        if call is None:
            return None
        taken.add(call.call_index)
        return call if call.call_index < self.script.changed_at else None
