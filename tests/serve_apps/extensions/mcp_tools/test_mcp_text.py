"""mcp_text: answers of MCP tools, of every kind of content."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from mcp_types import CallToolResult

from serve_apps.extensions.mcp_tools.mcp_text import text_of

pytestmark = pytest.mark.fast

PICTURE = base64.b64encode(b"\x89PNG\xff").decode()
TABLE = base64.b64encode("a,b\n1,é".encode()).decode()


def answer(*content: dict[str, Any], **more: Any) -> str:
    return text_of(CallToolResult.model_validate({"content": content, **more}))


def resource(**facts: Any) -> dict[str, Any]:
    return {"type": "resource", "resource": {"uri": "file:///a", **facts}}


TEXT = {"type": "text", "text": "downloaded 1 file"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([TEXT, resource(text="The moon\nis far.")], "downloaded 1 file\n[resource file:///a]\nThe moon\nis far."),
        ([resource(text="", mimeType="text/plain")], "[resource file:///a]\n"),
        ([resource(blob=TABLE, mimeType="text/csv; charset=utf-8")], "[resource file:///a]\na,b\n1,é"),
        ([resource(blob=PICTURE, mimeType="image/png")], "[resource file:///a: image/png, 5 bytes, no text]"),
        ([resource(blob=PICTURE, mimeType="text/plain")], "[resource file:///a: text/plain, 5 bytes, no text]"),
        ([resource(blob="no base64", mimeType="text/plain")], "[resource file:///a: text/plain, 6 bytes, no text]"),
        ([resource(blob=PICTURE)], "[resource file:///a: unknown type, 5 bytes, no text]"),
        ([TEXT, {"type": "resource_link", "uri": "https://x/y", "name": "y"}], "downloaded 1 file\n[resource_link https://x/y: y]"),
        (
            [
                {
                    "type": "resource_link",
                    "uri": "file:///moon",
                    "name": "moon.txt",
                    "title": "The moon",
                    "description": "How far it is",
                    "mimeType": "text/plain",
                }
            ],
            "[resource_link file:///moon: The moon, moon.txt, How far it is, text/plain]",
        ),
        ([{"type": "image", "data": PICTURE, "mimeType": "image/png"}], "[image: image/png, 5 bytes, no text]"),
        ([{"type": "audio", "data": PICTURE, "mimeType": "audio/wav"}], "[audio: audio/wav, 5 bytes, no text]"),
        ([], ""),
    ],
)  # fmt: skip
def test_all_text_of_an_answer_is_given_and_what_is_none_is_named(content: list[dict[str, Any]], text: str) -> None:
    assert answer(*content) == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], '{"result": "é"}'),
        ([{"type": "text", "text": ""}], '{"result": "é"}'),
        (
            [{"type": "image", "data": PICTURE, "mimeType": "image/png"}],
            '[image: image/png, 5 bytes, no text]\n{"result": "é"}',
        ),
        ([TEXT], "downloaded 1 file"),
        ([resource(text="far")], "[resource file:///a]\nfar"),
    ],
)
def test_data_is_given_where_an_answer_has_no_other_text(content: list[dict[str, Any]], text: str) -> None:
    assert answer(*content, structuredContent={"result": "é"}) == text
