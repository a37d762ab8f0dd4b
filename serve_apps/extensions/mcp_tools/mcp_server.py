"""mcp_server: how an MCP server is reached, whether arguments fit the schema of one of its tools, and whether that has changed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serve_apps.authoring.agent import ToolError, ToolFault
from stores.urls import without_secrets

if TYPE_CHECKING:
    import mcp_types


class McpServer(BaseModel):
    """Says how a server is reached: by a command that speaks MCP on its standard streams, or by a URL (Streamable HTTP)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = ()
    """The command, and its arguments."""
    url: str = ""
    """The address of a running server, in place of a command."""
    token_variable: str = ""
    """The environment variable that holds the token sent to the URL (`Authorization: Bearer ...`)."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables of the command. It gets PATH, HOME, LOGNAME, SHELL, TERM and USER from this process."""
    inherit: tuple[str, ...] = ()
    """Names of variables that the command gets from this process."""
    folder: str | None = None
    """The folder that the command runs in."""
    session: Literal["shared", "episode"] = "shared"
    """Whether all episodes of a process share a session, or each has its own: for servers that remember what was done."""
    start_timeout_s: float = Field(60.0, gt=0, allow_inf_nan=False)
    """How long the server may take to start and to name its tools."""

    @model_validator(mode="before")
    @classmethod
    def _with_pairs(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("environment"), dict):
            return data | {"environment": tuple(data["environment"].items())}
        return data

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("give `command`, or the `url` of a running server")
        if self.url and without_secrets(self.url) != self.url:
            raise ValueError(
                "the url holds a password: put it into an environment variable, and name that as token_variable"
            )
        return self

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.url or " ".join(self.command)


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
