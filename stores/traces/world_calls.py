"""world_calls: which calls of a trace are those of a world, and what state a turn acted in.

A call of a world is {"world": its number, "reset": its settings} or {"world": ..., "step": the action}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stores.types import ToolCall, Trace

UNRECORDED = "unrecorded_characters"
"""What stands in the record instead of an `info` that is too long: its length."""
KEYS = ({"world", "reset"}, {"world", "step"})


def is_world_call(call: ToolCall) -> bool:
    """Whether a call began a world or acted in one."""
    return call.request.keys() in KEYS


def num_world_calls(trace: Trace) -> int:
    """Counts the calls of an episode that began a world or acted in one."""
    return sum(map(is_world_call, trace.tool_calls))


def num_world_steps(trace: Trace) -> int:
    """Counts the actions of an episode in its worlds."""
    return sum(is_world_call(call) and "step" in call.request for call in trace.tool_calls)


def info_of(call: ToolCall) -> Mapping[str, Any]:
    """Returns the `info` of a world event that was answered; ValueError where it was too long to be recorded."""
    info: Mapping[str, Any] = call.response["info"]
    if UNRECORDED in info:
        raise ValueError(
            f"event {call.call_index} of the world {call.tool!r}: its info of {info[UNRECORDED]} characters is not recorded, and the "
            "credit rule reads it: raise max_info of the Environment, or say less"
        )
    return info


def anchor_before(trace: Trace, turn_index: int) -> str:
    """Returns the anchor of the state that a turn acted in: of the newest world event before it; empty where there is none."""
    events = [c for c in trace.tool_calls if c.call_index < turn_index and c.response is not None and is_world_call(c)]
    return str(max(events, key=lambda call: call.call_index).response["anchor"]) if events else ""
