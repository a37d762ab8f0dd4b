"""seen: what a world answers -> text, reward, end, info and anchor, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from serve_apps.authoring.agent import AuthorError, TracedText
from serve_apps.authoring.environment import Environment
from stores.traces.conventions import UNRECORDED

COMPARED = ("text", "reward", "is_done", "anchor")
"""What must be equal where a world is played again. `info` may hold times and paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a world shows after a reset or an action."""

    text: TracedText
    reward: float
    """Of this action alone."""
    is_done: bool
    info: Mapping[str, Any]
    anchor: str
    """Names the state of the world: two equal anchors of a task are one state. By default a hash of the text."""


def checked(answer: Any, environment: Environment, *, before: str) -> dict[str, Any]:
    """Returns what a world answered, with the defaults.

    Args: before: the anchor of the state before; empty at a reset.

    Raises AuthorError for what is no answer of a world.
    """
    if not isinstance(answer, Mapping):
        raise _fault(environment, f"returned {_shown(answer)}", 'a mapping like {"text": ...}')
    text, reward, info = answer.get("text"), answer.get("reward", 0.0), answer.get("info", {})
    if not isinstance(text, str):
        raise _fault(environment, f"returned text = {_shown(text)}", "a string")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise _fault(environment, f"returned reward = {_shown(reward)}", "a finite number")
    if not isinstance(answer.get("is_done", False), bool):
        raise _fault(environment, f"returned is_done = {_shown(answer['is_done'])}", "true or false")
    if not isinstance(info, Mapping):
        raise _fault(environment, f"returned info = {_shown(info)}", "a mapping")
    anchor = answer.get("anchor")
    if anchor is None:
        is_same = bool(before) and text.strip() in environment.unchanged
        anchor = before if is_same else sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
    return {
        "text": text,
        "reward": float(reward),
        "is_done": answer.get("is_done", False),
        "info": dict(info),
        "anchor": str(anchor),
    }


def recorded(seen: Mapping[str, Any], max_info: int) -> dict[str, Any]:
    """Returns what the trace keeps: all but an `info` of more characters, of which it says the length."""
    length = len(json.dumps(seen["info"], default=str))
    return {**seen, "info": seen["info"] if length <= max_info else {UNRECORDED: length}}


def _fault(environment: Environment, what: str, instead: str) -> AuthorError:
    return AuthorError(f"the world {environment.name} {what}: it must be {instead}")


def _shown(value: Any) -> str:
    return repr(value)[:80]
