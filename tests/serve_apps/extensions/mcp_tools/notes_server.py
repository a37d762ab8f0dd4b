"""An MCP server for tests, on its standard streams: `python -m tests.serve_apps.extensions.mcp_tools.notes_server [FILE]`.

It remembers notes while its process lives. FILE holds what `add` is called with where it exists: its schema is then another one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp_types import ContentBlock, EmbeddedResource, ResourceLink, TextContent, TextResourceContents

SERVER = MCPServer("notes", version="1.2")
NOTES: list[str] = []


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def add_three(a: int, b: int, c: int) -> str:
    """Adds three numbers."""
    return str(a + b + c)


@SERVER.tool()
def remember(text: str) -> str:
    """Keeps a note, and says how many there are."""
    NOTES.append(text)
    return str(len(NOTES))


@SERVER.tool()
def pid() -> str:
    """Says which process answers."""
    return str(os.getpid())


@SERVER.tool()
def variable(name: str) -> str:
    """Says what an environment variable holds."""
    return os.environ.get(name, "")


@SERVER.tool()
def download(name: str) -> list[ContentBlock]:
    """Answers with a text, a file and a link."""
    uri = f"file:///{name}"
    return [
        TextContent(text="downloaded 1 file"),
        EmbeddedResource(resource=TextResourceContents(uri=uri, text="The moon is far.")),
        ResourceLink(uri=f"{uri}.pdf", name="as a PDF"),
    ]


@SERVER.tool()
def fail(why: str) -> str:
    """Fails as it is told."""
    raise ValueError(why)


@SERVER.tool()
def die() -> str:
    """Ends the process in the middle of the call."""
    os._exit(3)


@SERVER.tool()
def log(mebibytes: int) -> str:
    """Writes to standard error."""
    for _ in range(mebibytes):
        sys.stderr.write("x" * 2**20)
    sys.stderr.write("the end\n")
    sys.stderr.flush()
    return "logged"


@SERVER.tool()
def sleep(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "slept"


if __name__ == "__main__":
    is_changed = len(sys.argv) > 1 and Path(sys.argv[1]).exists()
    SERVER.add_tool(add_three if is_changed else add, name="add")
    SERVER.run("stdio")
