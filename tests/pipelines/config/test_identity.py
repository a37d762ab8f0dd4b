"""The hash of a run config: the mark beside each field decides whether a change of it makes another run."""

from __future__ import annotations

import types
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from pipelines.config.run_config import RunConfig, parse_config
from stores.extensions import section_models
from stores.settings import identifies

pytestmark = pytest.mark.fast

DEMO = yaml.safe_load((Path(__file__).parents[3] / "infra" / "runs" / "demo.yaml").read_text())
OPTIONAL: dict[str, dict[str, Any]] = {
    "cost": {"at_most": 50},
    "swap": {"groups": ["a", "b"]},
    "schedule": {"cron": "@daily"},
    "tasks.sentinel": {"path": "tasks.jsonl"},
    "collect.variants": {"kind": "greedy"},
    "collect.dynamic_sampling": {},
    "collect.from_service": {},
    "evaluate.control": {"agent": "solver"},
    "train.lora": {},
    "train.overlong": {"buffer_tokens": 8},
    "train.agents.solver": {"overlong": {"buffer_tokens": 8}},
    "train.loss.adaptive_kl": {},
    "warmstart.traces": {"uri": "traces", "run": "other"},
}
"""Sections that are off in the demo, so that their fields are walked, too. Together they are no valid run config."""


def full_config() -> RunConfig:
    """The demo's config with every optional section; the rules between sections are not applied."""
    config = parse_config(DEMO, "demo.yaml")
    for dotted, section in OPTIONAL.items():
        path = tuple(dotted.split("."))
        config = replaced(config, path, section_class(path).model_validate(section))
    return config


def section_class(path: tuple[str, ...]) -> type[BaseModel]:
    """The class of the section at `path`, in which the keys of mappings are no fields."""
    kind: type[BaseModel] = RunConfig
    for name in path:
        if name in kind.model_fields:
            kind = next(sections_in(kind.model_fields[name].annotation))
    return kind


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes that an annotation names."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def replaced(value: Any, path: tuple[str, ...], new: Any) -> Any:
    """`value` with another value at `path`; nothing is validated."""
    if not path:
        return new
    if isinstance(value, dict):
        return value | {path[0]: replaced(value.get(path[0]), path[1:], new)}
    return value.model_copy(update={path[0]: replaced(getattr(value, path[0]), path[1:], new)})


def fields_of(section: BaseModel, path: tuple[str, ...] = (), counts: bool = True) -> Iterator[tuple[Any, ...]]:
    """Yields (class, name, path, another value, whether a change makes another run) of every field that is no section."""
    for name, field in type(section).model_fields.items():
        value, place = getattr(section, name), (*path, name)
        counts_here = counts and identifies(field, object())
        if not list(sections_in(field.annotation)):
            yield type(section), name, place, other(value, field.annotation), counts_here
        elif isinstance(value, BaseModel):
            yield from fields_of(value, place, counts_here)
        elif isinstance(value, dict):
            for key, part in value.items():
                yield from fields_of(part, (*place, key), counts_here)


def other(value: Any, annotation: Any) -> Any:
    """A value for the same annotation that differs."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return next((choice for choice in args if choice != value), "a choice of a later version")
    if origin in (Union, types.UnionType):
        return other(value, next(arg for arg in args if arg is not type(None)))
    if origin is Annotated:  # a number or a word for "find out"
        return other(value if isinstance(value, args[0]) else None, args[0])
    if origin is tuple:
        if not value:
            return tuple(other(None, arg) for arg in args if arg is not ...)
        return (other(value[0], args[0]), *value[1:])
    if origin is dict:
        return {**value, "another": "" if args[1] is str else 1.0}
    if annotation is bool:
        return not value
    if annotation in (int, float):
        return annotation((value or 0) + 1)
    return (
        f"{value}x" if annotation is str else date(2027, 1, 1) if value is None else value.replace(year=value.year + 1)
    )


def all_fields(kind: type[BaseModel]) -> set[tuple[type[BaseModel], str]]:
    """Every field of a class and its sections that is no section; those of extensions have their tests there."""
    found = set()
    for name, field in kind.model_fields.items():
        if name in section_models():
            continue
        sections = list(sections_in(field.annotation))
        found |= {(kind, name)} if not sections else {pair for section in sections for pair in all_fields(section)}
    return found


def test_the_mark_beside_each_field_decides_whether_a_change_makes_another_run() -> None:
    config = full_config()
    before = config.model_copy().sha256
    walked = list(fields_of(config))
    assert {(kind, name) for kind, name, *_ in walked} == all_fields(RunConfig), "a field was not walked: see OPTIONAL"
    wrong = [
        f"{'.'.join(path)} should {'' if counts else 'not '}change the hash"
        for _, _, path, new, counts in walked
        if (replaced(config, path, new).sha256 != before) != counts
    ]
    assert not wrong


def test_a_field_that_does_nothing_at_its_default_counts_only_away_from_it() -> None:
    spelled_out = {**DEMO, "collect": {**DEMO["collect"], "oversample": 1.0}}
    assert parse_config(spelled_out, "run.yaml").sha256 == parse_config(DEMO, "run.yaml").sha256
    spelled_out["collect"]["oversample"] = 1.5
    assert parse_config(spelled_out, "run.yaml").sha256 != parse_config(DEMO, "run.yaml").sha256
