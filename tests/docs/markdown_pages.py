"""markdown_pages: the tracked Markdown files -> their headings, links and fenced code blocks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_A_RUN_CONFIG = "<!-- not a run config -->"
"""Stands before a fenced YAML block that is neither a run config nor a part of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A fenced code block."""

    page: str
    """Path below the root."""
    line: int
    language: str
    text: str
    before: str
    """The last line of text before the block."""
    file: str = ""
    """The file that the text before names with a colon: "`team.py`:"."""

    def __str__(self) -> str:
        """`page:line`."""
        return f"{self.page}:{self.line}"


@cache
def pages() -> tuple[str, ...]:
    """Paths of the Markdown files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(sorted(path for path in set(listed) if (ROOT / path).is_file()))


def text_of(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str) -> Iterator[Fence]:
    """The fenced code blocks of a page, in order."""
    language, begin, block, before, file = "", 0, None, "", ""
    for number, line in enumerate(text_of(page).splitlines(), 1):
        if block is None and (opened := re.match(r"\s*```(\S*)", line)):
            language, begin, block = opened[1], number, []
        elif block is not None and line.strip() == "```":
            text = "\n".join(block) + "\n"
            yield Fence(page=page, line=begin, language=language, text=text, before=before, file=file)
            block, file = None, ""
        elif block is not None:
            block.append(line)
        elif line.strip():
            before = line.strip()
            if not before.startswith("<!--"):
                file = named[1] if (named := re.search(r"`([\w./-]+\.\w+)`:$", before)) else ""


def prose(page: str) -> str:
    """The page without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^\s*```.*?^\s*```", "", text_of(page), flags=re.MULTILINE | re.DOTALL))


def anchors(page: str) -> set[str]:
    """The identifiers that a page's headings have on GitHub and in the site, and those that it gives itself."""
    without_code = re.sub(r"^\s*```.*?^\s*```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", without_code, re.MULTILINE)
    given = set(re.findall(r'<a id="([^"]+)">', without_code))
    return given | {"-".join(re.sub(r"[^\w\s-]", "", heading).lower().split()) for heading in headings}


def links(page: str) -> Iterator[str]:
    """Targets of the links and pictures of a page."""
    yield from re.findall(r"\]\(([^)\s]+)\)", prose(page))
