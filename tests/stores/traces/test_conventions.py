"""Calls of a world in a trace: told apart from those of tools, counted, and read for the state that a turn acted in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from records import build_trace

from pipelines.figures.registry import figures_of
from stores.traces.conventions import anchor_before, is_world_call, num_world_calls, num_world_steps
from stores.types import Trace

pytestmark = pytest.mark.fast


@pytest.fixture
def played() -> Trace:
    """A tool call, a world that begins, and two steps, of which the last failed; turns before, between and after."""
    base = build_trace()
    call, turn = base.tool_calls[0], base.turns[0]

    def event(index: int, request: dict[str, Any], anchor: str | None) -> Any:
        shown = None if anchor is None else {"text": "a", "reward": 0.0, "anchor": anchor}
        return replace(call, call_index=index, request=request, response=shown, error="" if shown else "it died")

    calls = (
        replace(call, call_index=1, request={"world": "of tomorrow", "query": "a"}),
        event(2, {"world": 0, "reset": {"seed": 3}}, "first"),
        event(4, {"world": 0, "step": "walk"}, "second"),
        event(6, {"world": 0, "step": "walk"}, None),
    )
    turns = tuple(replace(turn, turn_index=index, round_index=n, parents=()) for n, index in enumerate((0, 3, 5, 7)))
    return replace(base, turns=turns, tool_calls=calls)


def test_a_call_of_a_world_is_none_of_a_tool_and_counted_by_itself(played: Trace) -> None:
    assert [is_world_call(call) for call in played.tool_calls] == [False, True, True, True]
    assert (num_world_calls(played), num_world_steps(played)) == (3, 2)
    figures = figures_of(played)
    assert (figures["tool_calls"], figures["world_steps"]) == (1.0, 2.0)
    without = replace(played, tool_calls=played.tool_calls[:1])
    assert "world_steps" not in figures_of(without)


def test_a_turn_acted_in_the_state_that_the_world_had_shown_last(played: Trace) -> None:
    assert [anchor_before(played, turn.turn_index) for turn in played.turns] == ["", "first", "second", "second"]
