"""world: a page of MiniWoB++ in a real browser -> a world in text: what is asked, and what can be seen, with numbers to act on.

    Environment("tests.worlds.miniwob.world:Page", python=".venvs/miniwob/bin/python", paths=(".",), is_isolated=True)

    Select 42hqD, kQ and click Submit.        click 6
    6 input_checkbox = off: 42hqD             type 9 some words
    8 input_checkbox = off: kQ
    10 button: Submit

Pages and rewards are those of the package. Its clock is left out, so that a world is its settings and the actions so far: a page waits
for as long as agents think, the reward does not shrink meanwhile, and nothing is animated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.worlds.miniwob.browser import Browser, browser_for

ACTION = re.compile(r"click (\d{1,6})|type (\d{1,6}) (.{1,256})")
NOTHING, OVER = "Nothing happens.", "The page is done."
NO_WORDS = ("button", "checkbox", "color", "file", "image", "radio", "range", "reset", "submit")
"""Types of `<input>` that nothing is typed into."""
BEGIN = """
if (window.jQuery) jQuery.fx.off = true;
core.EPISODE_MAX_TIME = 2147483647;
Math.seedrandom(arguments[0]);
core.setDataMode('train');
core.startEpisodeReal();
"""
"""As the package begins an episode. The longest time of a timer is 24 days."""
LOOK = r"""
const styles = [...document.querySelectorAll('#area *')].map(element => getComputedStyle(element).content);
const icons = styles.flatMap(style => /^url\("(.+)"\)/.exec(style)?.[1] ?? []);
const images = [...new Set(icons)].map(url => Object.assign(new Image(), {src: url}));
await Promise.allSettled([...document.images, ...images].map(image => image.decode()));
await new Promise(resolve => setTimeout(resolve));
const asked = core.getUtterance();
return {
  asked: asked.utterance || asked, root: core.getDOMInfo(), is_done: WOB_DONE_GLOBAL, raw_reward: WOB_RAW_REWARD_GLOBAL
};
"""
"""Pictures, those of style sheets, too, have a size and so are seen once they are loaded. What the page does at once is awaited."""
CLICK = "return core.elementClick(arguments[0]) === true;"
SELECT = "if (document.activeElement.select) document.activeElement.select();"


class Page:
    """A page that asks for something. All pages of a worker share one browser, so it has one page at a time."""

    browser: Browser

    def __init__(self, page: str, seed: int, max_characters: int = 4000) -> None:
        """Args:
        page: a file of MiniWoB++ without its suffix, `click-button` for example.
        seed: of what it asks, and of where things are.
        max_characters: of a longer page the beginning and the end are shown, so many in all.
        """
        self.page, self.seed, self.max_characters = page, seed, max_characters
        self.tags: dict[int, str] = {}
        """By number, the tags of what is shown."""

    def reset(self) -> dict[str, Any]:
        """Opens the page and returns what it shows.

        Raises ValueError for an unknown page, RuntimeError while another page has the browser, and BrowserFailed.
        """
        if self.page not in (known := pages()):
            raise ValueError(f"page = {self.page!r}: MiniWoB++ has no such page; it has {', '.join(known)}")
        self.browser = browser_for(self)
        self.browser.open(known[self.page].as_uri())
        self.browser.run(BEGIN, self.seed)
        return self._shown()

    def step(self, action: str) -> dict[str, Any]:
        """Clicks on an element, or replaces what stands in one by other words.

        The reward comes with the end: the page's own where that is above 0, else 0. Raises BrowserFailed.
        """
        return self._shown() if self._act(action) else self._shown(note=f"\n{NOTHING}")

    def close(self) -> None:
        """Leaves the browser to the next page."""
        if hasattr(self, "browser"):
            self.browser.user = None

    def _act(self, action: str) -> bool:
        """Acts, and says whether that was possible."""
        match = ACTION.fullmatch(" ".join(action.split()))
        if match is None:
            return False
        number, words = int(match[1] or match[2]), match[3]
        if number not in self.tags or (words is not None and not can_be_typed(words, self.tags[number])):
            return False
        if not self.browser.run(CLICK, number):
            return False
        if words is not None:
            self.browser.run(SELECT)
            self.browser.press(words)
        return True

    def _shown(self, note: str = "") -> dict[str, Any]:
        seen = self.browser.run(LOOK)
        lines, reward = [OVER], 0.0
        if seen["is_done"]:
            reward = float(seen["raw_reward"])
        else:
            elements = elements_of(seen["root"])
            self.tags = {element.number: element.tag for element in elements if element.number}
            lines = [_one_line(seen["asked"]), *map(str, elements)]
        text = "\n".join(lines)
        return {
            "text": _cut(text, self.max_characters) + note,
            "reward": max(0.0, reward),
            "is_done": bool(seen["is_done"]),
            "info": {"page": self.page, "raw_reward": reward, "is_won": reward >= 1},
            "anchor": sha256(text.encode()).hexdigest()[:16],
        }


@dataclass(frozen=True)
class Element:
    """An element that has no others in it, or text beside elements."""

    number: int
    """What actions call it, the same in the whole episode; 0 for text."""
    tag: str
    """In MiniWoB++'s words: `button`, `input_checkbox`; `text` for text."""
    text: str
    value: str | bool | None = None
    """What stands in it, or whether it is checked; None where neither can be."""

    def __str__(self) -> str:
        """The line that agents read."""
        value = f'"{_one_line(self.value)}"' if isinstance(self.value, str) else "on" if self.value else "off"
        name = f"{self.number} {self.tag}" if self.number else self.tag
        shown = name if self.value is None else f"{name} = {value}"
        return f"{shown}: {self.text}" if self.text else shown


def elements_of(node: Mapping[str, Any]) -> list[Element]:
    """Returns what is in a node of `core.getDOMInfo`, in the page's order.

    Text right behind an input is the input's: so a checkbox has its name. What has neither text nor value is called by its id or class.
    """
    if all(child["tag"] == "t" for child in node["children"]):
        text = _one_line(node.get("text") or " ".join(child["text"] for child in node["children"]))
        value = node.get("value")
        if not text and value is None:
            text = _one_line(f"{node['id']} {node['classes']}")
            return [Element(node["ref"], node["tag"].lower(), text)] if text else []
        return [Element(node["ref"], node["tag"].lower(), text, value)]
    found: list[Element] = []
    for child in node["children"]:
        if child["tag"] != "t":
            found += elements_of(child)
        elif found and found[-1].value is not None:
            found[-1] = replace(found[-1], text=_one_line(f"{found[-1].text} {child['text']}"))
        else:
            found.append(Element(0, "text", _one_line(child["text"])))
    return found


def can_be_typed(words: str, tag: str) -> bool:
    """Whether keys of a keyboard make these words, and the element takes any. A list is chosen from by typing its words."""
    kind = tag.removeprefix("input_")
    takes_words = kind not in NO_WORDS if kind != tag else tag in ("textarea", "select")
    return takes_words and words.isprintable() and max(words) <= "\uffff"


@cache
def pages() -> Mapping[str, Path]:
    """Returns the files of all pages by name. Raises ModuleNotFoundError where MiniWoB++ is not installed."""
    spec = find_spec("miniwob")  # importing it takes a second, and gives nothing that is needed
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("no module 'miniwob': install tests/worlds/miniwob/requirements.txt")
    return {path.stem: path for path in sorted((Path(spec.origin).parent / "html" / "miniwob").glob("*.html"))}


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}\n...\n{text[-(most // 2) :]}"
