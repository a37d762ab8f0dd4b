"""The documentation is complete and current: generated pages, the built site, citations that a reader can follow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown_pages import ROOT, anchors, links, pages

pytestmark = pytest.mark.test


def test_the_generated_pages_are_current() -> None:
    command = [sys.executable, "infra/docs_reference.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: warnings are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "-f",
        "infra/mkdocs.yml",
        "-d",
        str(folder),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_needs_no_network(site: Path) -> None:
    loaded = re.compile(r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]+"')
    for page in site.rglob("*.html"):
        assert loaded.search(page.read_text(encoding="utf-8")) is None, page.relative_to(site)
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8"), "its script would come from the network"


def test_the_site_can_be_searched_where_it_is_opened_as_files(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    assert "assets/iframe-worker.js" in (site / "index.html").read_text()


def test_every_page_is_in_the_site(site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")} - {"404.md"}
    written = {page.removeprefix("infra/docs/") for page in pages() if page.startswith("infra/docs/")}
    assert built == written


def test_every_config_key_has_an_entry_in_the_reference() -> None:
    from pipelines.config.run_config import RunConfig

    sections = anchors("infra/docs/reference/config.md")
    assert {"collect", "train", "trainloss", "gatewaycapture", "model_groupsname"} <= sections
    page = (ROOT / "infra/docs/reference/config.md").read_text(encoding="utf-8")
    assert [name for name in RunConfig.model_fields if f"| `{name}`" not in page] == []


def test_no_tracked_file_cites_a_document_that_is_not_here() -> None:
    command = ["git", "grep", "-nIE", "seed-system[s]|stack-fact[s]|[Dd]esign rul[e]"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert found == ""


def test_source_cites_pages_and_records_that_exist() -> None:
    command = ["git", "grep", "-noIhE", r"infra/docs/[a-z/_-]+\.md(#[a-z0-9_-]+)?", "--", "*.py", "*.yaml", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for citation in {line.split(":", 1)[1] for line in listed}:
        path, _, anchor = citation.partition("#")
        assert (ROOT / path).is_file(), citation
        assert not anchor or anchor in anchors(path), citation


def test_the_front_page_leads_to_every_tutorial() -> None:
    front = set(links("infra/docs/index.md"))
    tutorials = {page.removeprefix("infra/docs/") for page in pages() if page.startswith("infra/docs/tutorials/")}
    assert tutorials <= front
