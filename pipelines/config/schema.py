"""schema: the run config -> its JSON schema, from which the reference is generated and editors complete the YAML."""

from __future__ import annotations

from typing import Any

from pipelines.config.run_config import RunConfig


def run_config_schema() -> dict[str, Any]:
    """Returns the JSON schema (draft 2020-12) of a run config's YAML file.

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
