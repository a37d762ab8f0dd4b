"""paths: dotted paths of modules that have moved are refused with the new path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pipelines.config.renamed import MOVED_MODULES
from pipelines.config.run_sections import RunSections

MOVED = re.compile(r"(?<![\w.])(?:" + "|".join(map(re.escape, sorted(MOVED_MODULES, reverse=True))) + r")(?![\w.])")


def paths_are_current(config: RunSections) -> None:
    """No dotted path names a module at its old place."""
    for key, text in _paths(config):
        current = MOVED.sub(lambda match: MOVED_MODULES[match[0]], text)
        if current != text:
            raise ValueError(f"{key}: {text!r} has moved: it is {current!r} now")


def _paths(config: RunSections) -> Iterator[tuple[str, str]]:
    """Yields the key and the text of every dotted path, and of every text in the workflow's settings, which may hold
    one."""
    yield "workflow.path", config.workflow.path
    yield from _texts("workflow.settings", config.workflow.settings)
    yield "credit.path", config.credit.path
    for name in type(config.tasks).model_fields:
        source = getattr(config.tasks, name)
        if source is not None and source.generator is not None:
            yield f"tasks.{name}.generator.path", source.generator.path
    if config.warmstart is not None:
        yield "warmstart.demonstrator", config.warmstart.demonstrator


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts(f"{key}.{name}", part)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _texts(f"{key}.{index}", part)
