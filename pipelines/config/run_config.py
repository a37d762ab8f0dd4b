"""run_config: YAML -> one frozen run config. An unknown key is refused with the nearest known one.

Pydantic and the standard library only, so that the command line answers at once and Airflow parses without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, ValidationError, create_model, model_validator

from pipelines.config.messages import GONE, explain
from pipelines.config.rules import RULES
from pipelines.config.run_sections import RunSections, merged
from serve_apps.authoring.yaml_text import read_yaml
from stores.config import refuse_secrets
from stores.extensions import section_models
from stores.settings import NOT_IDENTITY, identity

OF_A_SHELL = re.compile(r"(~\w*|\$\{?[A-Z_]+\}?)/")
"""The beginning of a path that a shell would replace."""

if TYPE_CHECKING:
    _Sections = RunSections
else:  # what an extension adds is known only where it is installed
    _Sections = create_model(
        "RunSections",
        __base__=RunSections,
        **{
            name: (model | None, Field(None, description=model.__doc__, json_schema_extra=NOT_IDENTITY))
            for name, model in section_models({*RunSections.model_fields, *dir(RunSections)}).items()
        },
    )


class RunConfig(_Sections):
    """A run config describes one training of a team: its sections are valid and fit together."""

    @model_validator(mode="before")
    @classmethod
    def _goes_on(cls, data: Any) -> Any:
        """Drops keys that are no settings any more: stored runs and teams have them."""
        return _without_gone(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        for rule in RULES:
            rule(self)
        return self

    @property
    def names_of_code(self) -> dict[str, Any]:
        """The sections, as JSON values, whose dotted paths name modules that travel with the team, for `collect_code`."""
        return self.model_dump(
            mode="json", include={"workflow", "credit", "evaluate", "train", "serve", "model_groups"}
        )

    @cached_property
    def sha256(self) -> str:
        """The hash of everything that changes results: two configs with the same hash are the same run.

        What does not count is marked beside each field, see `stores.settings`: where results are stored, how many iterations
        there are, serving and monitoring, deadlines and capacity. Nor do fields count that do nothing at their default:
        runs that began before such a field existed go on.
        """
        return sha256(repr(_sorted(identity(self))).encode()).hexdigest()


def _without_gone(data: dict[str, Any]) -> dict[str, Any]:
    """Drops the keys of GONE, also from the sections of model groups."""
    for place in GONE:
        data = _without(data, *place.split("."))
    if isinstance(groups := data.get("model_groups"), dict):
        cleaned = {name: _without_gone(of) if isinstance(of, dict) else of for name, of in groups.items()}
        data = data | {"model_groups": cleaned}
    return data


def _without(data: dict[str, Any], key: str, *below: str) -> dict[str, Any]:
    if below:
        own = data.get(key)
        return data | {key: _without(own, *below)} if isinstance(own, dict) else data
    return {name: value for name, value in data.items() if name != key}


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [(k, _sorted(v)) for k, v in sorted(value.items())]
    if isinstance(value, (list, tuple)):
        return [_sorted(v) for v in value]
    return value


def run_config_schema() -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of a run config's YAML file, for the reference and for editors.

    Every property has a description. `"identity": false` marks fields that do not count for the hash of a run, and
    `"identity": "if_changed"` those that count only away from their default. A file that begins from another one by
    `extends` needs no other key.
    """
    schema = RunConfig.model_json_schema()
    extends = {
        "type": "string",
        "title": "Extends",
        "description": "The path of another run config, relative to this file, whose keys are the defaults of this one.",
    }
    required = {"if": {"not": {"required": ["extends"]}}, "then": {"required": schema.pop("required")}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Troupe run config",
        "properties": {"extends": extends, **schema["properties"]},
        **required,
    }


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads and validates a run config; `overrides` maps dotted keys to values.

    A config may begin from another one: `extends: other.yaml`, relative to its own folder. Its keys replace those of the
    other, section by section; `model_groups` replaces the whole mapping.

    Raises ValueError with value, place and fix for anything that is wrong with the file or its content.
    """
    data = with_keys(_read_config(Path(path), ()), overrides or {})
    for key, _ in leaves(data):
        name = re.sub(r"^model_groups\.[^.]+\.", "", key)
        if name in GONE:
            raise ValueError(f"{path}: {key!r} is no setting any more, {GONE[name]}: drop it")
    return parse_config(data, str(path))


def with_keys(data: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plain data of a run config with dotted keys set; ValueError where one leads through a value."""
    for key, value in keys.items():
        data = _assigned(data, key.split("."), value, key)
    return data


def _read_config(file: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    by = f" (named by `extends` in {extended_by[-1]})" if extended_by else ""
    if not file.is_file():
        raise ValueError(f"run config {file}{by} does not exist: check the path, from {Path.cwd()}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not YAML: {error}") from None
    data = read_yaml(text, str(file))
    if not isinstance(data, dict):
        raise ValueError(f"{file}: a run config is a mapping of sections, this is {type(data).__name__}")
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ValueError(f"{file}: extends = {base!r} is no path: name one run config")
    parent, chain = file.parent / base, (*extended_by, file)
    if parent.resolve() in {path.resolve() for path in chain}:
        raise ValueError(f"{file}: extends = {base} leads back to itself: {' -> '.join(map(str, (*chain, parent)))}")
    inherited = _read_config(parent, chain)
    if "model_groups" in data:  # a mapping is one thing: an agent must not keep its group of before
        inherited.pop("model_groups", None)
    return merged(inherited, data)


def parse_config(data: Mapping[str, Any], place: str) -> RunConfig:
    """Returns a run config from plain data; raises ValueError naming `place`, key and fix."""
    for key, value in leaves(data):
        try:
            # Also where a section takes any value, as `settings` do.
            if isinstance(value, str):
                refuse_secrets(value)
                if name := OF_A_SHELL.match(value):
                    raise ValueError(
                        f"{value}: no shell reads this, and {name[0]} would be a folder: write the whole path"
                    )
            elif isinstance(value, float) and not isfinite(value):
                raise ValueError(f"{value} is no finite number: give one, or leave the key out")
        except ValueError as error:
            raise ValueError(f"{place}: {key}: {error}") from None
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ValueError(explain(error, RunConfig, place)) from None


def leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value in plain data that holds no others, with its dotted key."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(data, (list, tuple)):
        for number, value in enumerate(data):
            yield from leaves(value, f"{key}.{number}")
    else:
        yield key, data


def _assigned(data: Mapping[str, Any], keys: Sequence[str], value: Any, dotted: str) -> dict[str, Any]:
    """Returns the data with a key set; sections that are missing or null are made. `data` stays as it is, like that of `merged`."""
    key, *below = keys
    if not below:
        return {**data, key: value}
    section = data.get(key)
    if not isinstance(section, Mapping | None):
        raise ValueError(f"--set {dotted}: {key!r} is not a section")
    return {**data, key: _assigned(section or {}, below, value, dotted)}
