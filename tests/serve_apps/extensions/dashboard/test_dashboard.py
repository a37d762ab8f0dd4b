"""The dashboard as a browser shows it: every view over a real store, hostile text as text, no script but its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_scene import fill, over_http, team_route
from gateway_scene import Scene, keys_file
from servers import free_port

from serve_apps.gateway.traffic.callers import make_key

pytestmark = [pytest.mark.nightly, pytest.mark.needs_program("chromium")]


@pytest.fixture(scope="module")
def site(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address of a gateway, and the id of a trace with hostile text."""
    folder = tmp_path_factory.mktemp("site")
    scene = Scene(tiny_model)
    scene.serve(team_route(tiny_model, folder))
    hostile = fill(folder, tiny_model)[0].episode_id
    with over_http(scene, free_port()) as url:
        yield url, hostile


def shown(url: str, profile: Path) -> tuple[str, str]:
    """The page's HTML after its scripts have run, and what the browser logged."""
    done = subprocess.run(
        [
            "chromium",
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"),
            *("--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", url),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_every_view_shows_what_is_stored_and_hostile_text_stays_text(site: tuple[str, str], tmp_path: Path) -> None:
    url, hostile = site
    views = {
        "": ["champion 75%", "candidate 25%", "shadow traffic 50%", "v2 still loaded on blue", "solver", "v9"],
        "/traces/demo": ["sum-20", "candidate", "truncated", "&lt;script&gt;document.title='owned'"],
        f"/traces/demo/{hostile}": [
            "4 turns, 1 tool calls",
            "calculator",
            "90 tokens",
            "advantage",
            "outcome-1",
            "Reference answer",
        ],
        f"/traces/demo/{hostile}?event=1": ["#1 calculator", "7 + 6 * 8", "&lt;img src=x onerror="],
        f"/traces/demo/{hostile}?event=2": [
            "#2 verifier",
            "Options, by probability pass 75%",
            "25%",
            "&lt;script&gt;",
        ],
        "/compare/demo/sum-0?purpose=gate": ["left − right", "worker v9", "worker v7", "Compute 7 + 6 * 8"],
        "/traces/demo/none": ["Not found", "no episode 'none'"],
        "/traces/demo?store=served": ["No production traces are stored"],
    }
    for view, expected in views.items():
        html, logged = shown(f"{url}/#{view}", tmp_path)
        missing = [text for text in expected if text not in words(html)]
        assert not missing, f"{view} lacks {missing}: {words(html)}"
        assert "· Troupe</title>" in html or "none" in view, "no script of a model's has named the page"
        assert "owned</title>" not in html and '<img src="x"' not in html and "<script>" not in html
        assert not logged or ("none" in view and "404" in logged), logged
    html, _ = shown(f"{url}/#/traces/demo/{hostile}", tmp_path)
    assert len(re.findall(r'class="tok p\d"[^>]*data-i', html)) == 90, "every token has its colour"
    assert html.count('class="block ') == 5 and html.count('<path class="arrow') == 5


FRAME = '<iframe width="400" height="800" src="page.html"></iframe><script>onmessage = (e) => (document.title = e.data)</script>'
MEASURE = """<script>onload = () => {
  const parts = [document.documentElement, document.querySelector("header.top")];
  parent.postMessage(parts.map((part) => `${part.scrollWidth}/${part.clientWidth}`).join(" "), "*");
}</script>"""


@pytest.mark.parametrize("view", ["", "/traces/demo", "/compare/demo/sum-0?purpose=gate"])
def test_a_narrow_page_shows_its_whole_header(view: str, site: tuple[str, str], tmp_path: Path) -> None:
    """What the scripts have drawn, in a frame of 400 px: a browser's window may be no narrower than 500."""
    html, _ = shown(f"{site[0]}/#{view}", tmp_path / "profile")
    drawn = re.sub(r"<script.*?</script>", "", html).replace("<head>", f'<head><base href="{site[0]}/">')
    (tmp_path / "page.html").write_text(drawn.replace("</body>", f"{MEASURE}</body>"))
    (tmp_path / "frame.html").write_text(FRAME)
    measured, _ = shown(f"file://{tmp_path}/frame.html", tmp_path / "profile")
    title = re.search(r"<title>(.*)</title>", measured)
    assert title is not None, measured
    for part in title[1].split():
        content, width = map(int, part.split("/"))
        assert content <= width <= 400, title[1]
    assert len(title[1].split()) == 2


def test_a_gateway_with_keys_asks_for_an_api_key(tiny_model: Path, tmp_path: Path) -> None:
    _, key = make_key("ops", scopes=("admin",))
    with over_http(Scene(tiny_model, keys_file=keys_file(tmp_path, key)), free_port()) as url:
        html, _ = shown(url, tmp_path / "profile")
    assert "This gateway requires an API key" in words(html) and 'type="password"' in html
