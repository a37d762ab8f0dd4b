"""dashboard: the page at `/` and its files from serve_apps/dashboard. It has no data of its own: the page asks admin_api."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response

from serve_apps.gateway.http.api_state import DashboardFiles
from serve_apps.openai_api.protocol import ApiError

FOLDER = Path(__file__).parents[2] / "dashboard"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


def read_files() -> dict[str, bytes]:
    """Reads the page and its files, by file name."""
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}


@router.get("/")
async def get_page(request: Request, files: DashboardFiles) -> Response:
    """Returns the page; it needs no API key."""
    return _file_response(request, "index.html", files["index.html"])


@router.get("/assets/{name}")
async def get_asset(name: str, request: Request, files: DashboardFiles) -> Response:
    """Returns one of the page's files; it needs no API key."""
    if name not in files:
        raise ApiError(404, f"the dashboard has no file {name!r}", code="not_found")
    return _file_response(request, name, files[name])


def _file_response(request: Request, name: str, content: bytes) -> Response:
    headers = HEADERS | {"ETag": f'"{sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)
