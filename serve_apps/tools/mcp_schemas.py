"""mcp_schemas: the schema that an MCP server gives a tool: whether arguments fit it, and whether it has changed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from serve_apps.authoring.agent import ToolError, ToolFault
from serve_apps.tools.mcp_server import McpServer

if TYPE_CHECKING:
    import mcp_types

logger = logging.getLogger(__name__)

_schemas: dict[tuple[McpServer, str], str] = {}
"""By tool, the hash of the schema that this process saw last."""


def note_schema(server: McpServer, tool: mcp_types.Tool) -> None:
    """Warns where a tool takes other arguments than when it was last seen."""
    key, now = (server, tool.name), schema_hash(tool)
    before = _schemas.get(key)
    _schemas[key] = now
    if before not in (None, now):
        logger.warning(
            "tool %s of the MCP server %s has another schema than before (%s, now %s): episodes before and after are not of one world; "
            "the calls say which",
            tool.name,
            server.name,
            before,
            now,
        )


def check_arguments(arguments: Mapping[str, Any], tool: mcp_types.Tool) -> None:
    """Raises ToolError where arguments do not fit the tool's schema, ToolFault where the schema cannot be followed."""
    import jsonschema
    import referencing

    try:
        fault = jsonschema.exceptions.best_match(validator_of(tool).iter_errors(dict(arguments)))
    except (referencing.exceptions.Unresolvable, re.error) as error:
        raise ToolFault(f"the schema of tool {tool.name} cannot be followed: {error}") from None
    if fault is not None:
        place = ".".join(map(str, fault.absolute_path)) or "arguments"
        raise ToolError(f"{place}: {fault.message[:300]}")


def validator_of(tool: mcp_types.Tool) -> Any:
    """Returns the validator of a tool's schema. References to other documents are not fetched."""
    import jsonschema
    import referencing

    kind = jsonschema.validators.validator_for(tool.input_schema, jsonschema.Draft202012Validator)
    return kind(tool.input_schema, registry=referencing.Registry())


def schema_hash(tool: mcp_types.Tool) -> str:
    """Returns what tells the schemas of a tool apart."""
    return sha256(json.dumps(tool.input_schema, sort_keys=True).encode()).hexdigest()[:8]
