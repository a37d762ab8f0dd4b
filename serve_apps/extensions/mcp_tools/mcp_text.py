"""mcp_text: what a tool of an MCP server answered -> text for an agent, of which none is lost; what is no text is named."""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mcp_types


def text_of(result: mcp_types.CallToolResult) -> str:
    """Returns the texts of an answer, each of a resource with its address. Where there are none its data, as JSON.

    A link stands with all that is said of it. Pictures, sounds and binary resources are named, with their type and size.
    """
    parts = [(_said(block), block) for block in result.content]
    lines = [_named(block) if said is None else said for said, block in parts]
    if result.structured_content is not None and not any(said for said, _ in parts):
        lines = [*filter(None, lines), json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(lines)


def _said(block: mcp_types.ContentBlock) -> str | None:
    if block.type == "text":
        return block.text
    if block.type != "resource":
        return None
    text = _text_in(block.resource)
    return None if text is None else f"[resource {block.resource.uri}]\n{text}"


def _text_in(resource: mcp_types.TextResourceContents | mcp_types.BlobResourceContents) -> str | None:
    """Returns the text of a resource, also of one that is sent as bytes of a type of text; None where it is none."""
    from mcp_types import TextResourceContents

    if isinstance(resource, TextResourceContents):
        return resource.text
    kind = (resource.mime_type or "").partition(";")[0].strip().lower()
    if not (kind.startswith("text/") or kind.endswith(("json", "xml", "yaml"))):
        return None
    try:
        return base64.b64decode(resource.blob, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def _named(block: mcp_types.ContentBlock) -> str:
    if block.type == "resource_link":
        facts = (block.title, block.name, block.description, block.mime_type)
        return f"[resource_link {block.uri}: {', '.join(dict.fromkeys(fact for fact in facts if fact))}]"
    if block.type == "resource":
        data, where, kind = getattr(block.resource, "blob", ""), f" {block.resource.uri}", block.resource.mime_type
    else:
        data, where, kind = getattr(block, "data", ""), "", getattr(block, "mime_type", None)
    size_bytes = len(data.rstrip("=")) * 3 // 4
    return f"[{block.type}{where}: {kind or 'unknown type'}, {size_bytes} bytes, no text]"
