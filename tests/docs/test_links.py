"""Links among Markdown files lead to files and headings that exist."""

from __future__ import annotations

import re
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


def test_the_reading_lists_of_the_loop_name_files_that_exist() -> None:
    page = (ROOT / "infra/docs/design/loop.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d+\. `([a-z_/]+\.(?:py|yaml))`: ", page, flags=re.MULTILINE)
    assert len(listed) == len(re.findall(r"^\d+\. `", page, flags=re.MULTILINE)) >= 60
    assert [path for path in listed if not (ROOT / path).is_file()] == []


def test_every_folder_has_a_readme_of_at_most_two_kilobytes() -> None:
    for folder in ("pipelines", "serve_apps", "train_loops", "stores", "dags", "infra", "tests"):
        assert 0 < (ROOT / folder / "README.md").stat().st_size <= 2048, folder


def _below_root(file: Path) -> str:
    return file.resolve().relative_to(ROOT).as_posix()
