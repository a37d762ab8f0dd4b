"""mcp_server: the settings by which an MCP server is reached."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stores.url_secrets import without_secrets


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
