"""The JSON schema of a run config: every property is described, and shipped configs are valid by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from pipelines.config.run_config import RunConfig, run_config_schema

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(path for folder in ("runs", "cluster") for path in (ROOT / "infra" / folder).glob("*.yaml"))


def described(schema: Any, place: str = "RunConfig") -> Iterator[tuple[str, str]]:
    """Yields every property of a schema, nested and in `$defs`, and every object, with its description."""
    if isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from described(part, f"{place}[{index}]")
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "object" and "properties" in schema:
        yield place, schema.get("description", "")
    for name, part in schema.get("properties", {}).items():
        yield f"{place}.{name}", part.get("description", "")
        yield from described(part, f"{place}.{name}")
    for name, part in schema.get("$defs", {}).items():
        yield from described(part, name)


def test_every_property_of_a_run_config_is_described_by_a_sentence() -> None:
    for schema in (RunConfig.model_json_schema(), run_config_schema()):
        descriptions = dict(described(schema))
        assert len(descriptions) > 300, "the schema was not walked"
        poor = {
            place: text for place, text in descriptions.items() if len(text.split()) < 4 or text.rstrip()[-1] != "."
        }
        assert not poor


def test_the_schema_says_which_fields_identify_a_run() -> None:
    schema = run_config_schema()
    assert schema["properties"]["iterations"]["identity"] is False
    assert "identity" not in schema["properties"]["seed"]
    assert schema["$defs"]["CollectConfig"]["properties"]["oversample"]["identity"] == "if_changed"


def test_a_file_that_begins_from_another_needs_no_other_key() -> None:
    schema = run_config_schema()
    assert schema["properties"]["extends"]["type"] == "string"
    assert schema["if"] == {"not": {"required": ["extends"]}} and "workflow" in schema["then"]["required"]
    assert "required" not in schema


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_is_valid_by_the_schema(path: Path) -> None:
    schema = run_config_schema()
    Draft202012Validator.check_schema(schema)
    data = yaml.safe_load(path.read_text())
    assert list(Draft202012Validator(schema).iter_errors(data)) == []
    assert list(Draft202012Validator(schema).iter_errors(data | {"sede": 1}))
