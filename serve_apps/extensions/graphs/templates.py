"""templates: a text with fields like {node.field.0}, values -> the text filled in. A brace is written twice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serve_apps.authoring.agent import TracedText
from serve_apps.extensions.graphs.expressions import look_up

FIELD = re.compile(r"\{([a-zA-Z_][\w.]*)\}")


def fields_of(template: str) -> list[str]:
    """Returns the dotted names that a template reads, each once."""
    return list(dict.fromkeys(FIELD.findall(_masked(template))))


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Fills in a template's fields; `{{` and `}}` stand for braces."""
    return _unmasked(FIELD.sub(lambda match: as_text(look_up(match[1], values)), _masked(template)))


def as_prompt(template: str) -> str:
    """Returns a template as an agent takes it: every dotted name is an input of its own (`input_name`)."""
    return (
        FIELD.sub(lambda match: f"{{{input_name(match[1])}}}", _masked(template))
        .replace("\0", "{{")
        .replace("\1", "}}")
    )


def input_name(field: str) -> str:
    """Returns the name of an agent's input for a dotted name like `a.b.0`."""
    return field.replace(".", "__")


def as_text(value: Any) -> str:
    """Returns a value as a prompt shows it: text unchanged, lists line by line, numbers and objects as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        lines = [part for item in value for part in (as_text(item), "\n")]
        return TracedText.joined(*lines[:-1])
    return json.dumps(value)


def stray_brace(template: str) -> str:
    """Returns the first brace, with what it encloses, that is neither a field nor written twice; empty where there is none."""
    match = re.search(r"\{[^{}]*\}?|\}", FIELD.sub("", _masked(template)))
    return match[0] if match else ""


def _masked(template: str) -> str:
    return template.replace("{{", "\0").replace("}}", "\1")


def _unmasked(text: str) -> str:
    return text.replace("\0", "{").replace("\1", "}")
