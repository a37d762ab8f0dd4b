"""demonstrator: agent, task, inputs -> a completion: it plays reader and actor on four pages, as somebody would who is sometimes careless.

The reader then names any element of the page; the actor always does what is right with the element that it sees.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from stores.types import Task

SHARE_CARELESS = 0.1
LINE = re.compile(r'(?P<number>\d+) (?P<tag>\S+)(?: = (?P<value>on|off|".*?"))?(?:: (?P<text>.*))?')
BUTTON = re.compile(r'Click button (?P<one>\w+)\.|Click on the "(?P<other>.+)" button\.')
WORDS = re.compile(r'Enter "(?P<words>.+)" into the text field and press Submit\.')
BOXES = re.compile(r"Select (?P<names>.+) and click Submit\.")


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    if agent == "actor":
        return f"<ACT>{right_action(inputs['task'], inputs['element'])}</ACT>"
    numbers = [match["number"] for match in map(LINE.fullmatch, inputs["see"].split("\n")[1:]) if match]
    is_careless = bool(numbers) and rng.random() < SHARE_CARELESS
    return f"<ELEMENT>{rng.choice(numbers) if is_careless else right_element(inputs['see'])}</ELEMENT>"


def right_element(see: str) -> str:
    """Returns the number of the element to use next. Raises ValueError for a page that is none of the four."""
    asked, *lines = see.split("\n")
    elements = [match for match in map(LINE.fullmatch, lines) if match]
    submit = [e["number"] for e in elements if (e["tag"], e["text"]) == ("button", "Submit")]
    if match := BUTTON.fullmatch(asked):
        name = match["one"] or match["other"]
        found = [e["number"] for e in elements if (e["tag"], e["text"]) == ("button", name)]
    elif match := WORDS.fullmatch(asked):
        typed = f'"{match["words"]}"'
        found = [e["number"] for e in elements if e["tag"] == "input_text" and e["value"] != typed] or submit
    elif match := BOXES.fullmatch(asked):
        names = match["names"].split(", ")
        boxes = [e for e in elements if e["tag"] == "input_checkbox"]
        found = [e["number"] for e in boxes if (e["value"] == "on") != (e["text"] in names)] or submit
    else:
        raise ValueError(f"no page that the demonstrator knows: it asks {asked!r}")
    return found[0]


def right_action(asked: str, element: str) -> str:
    """Returns what to do with the element of this line."""
    number, _, rest = element.partition(" ")
    words = WORDS.fullmatch(asked)
    return f"type {number} {words['words']}" if words and rest.startswith("input_text") else f"click {number}"
