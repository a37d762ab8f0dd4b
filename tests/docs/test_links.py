"""Links among Markdown files lead to files and headings that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown_pages import ROOT, anchors, links, pages

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("page", pages())
def test_relative_links_of_a_page_resolve(page: str) -> None:
    broken = []
    for target in links(page):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists():
            broken.append(f"{target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(_below_root(file)):
            broken.append(f"{target}: no such heading")
    assert broken == []


def test_every_folder_has_a_readme_of_at_most_two_kilobytes() -> None:
    for folder in ("pipelines", "serve_apps", "train_loops", "stores", "dags", "infra", "tests"):
        assert 0 < (ROOT / folder / "README.md").stat().st_size <= 2048, folder


def _below_root(file: Path) -> str:
    return file.resolve().relative_to(ROOT).as_posix()
