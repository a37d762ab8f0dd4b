"""dashboard: the page at `/` and its files, as they lie in serve_apps/dashboard. It has no data of its own: it asks admin_api."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response

from serve_apps.openai_api.protocol import ApiError

FOLDER = Path(__file__).parents[1] / "dashboard"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def dashboard_routes() -> APIRouter:
    """`GET /` and `GET /assets/{name}`, without a key."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in KINDS}
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page(request: Request) -> Response:
        """The page."""
        return _answer(request, "index.html", files["index.html"])

    @routes.get("/assets/{name}")
    async def asset(name: str, request: Request) -> Response:
        """One of its files."""
        if name not in files:
            raise ApiError(404, f"the dashboard has no file {name!r}", code="not_found")
        return _answer(request, name, files[name])

    return routes


def _answer(request: Request, name: str, content: bytes) -> Response:
    headers = HEADERS | {"ETag": f'"{sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=KINDS[Path(name).suffix], headers=headers)
