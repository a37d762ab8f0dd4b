"""demonstrator: agent, task, inputs -> a completion: it plays searcher and buyer as somebody would who knows the shop and is careless.

The searcher leaves the attribute out of its words, or takes the first product. The buyer takes the wrong color, or buys before it has
chosen one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from stores.types import Task

SHARE_CARELESS = 0.3
WISH = re.compile(r"(?P<attribute>\S+) (?P<kind>\S+), (?P<color>\S+), at most (?P<most>\d+)")
PRODUCT = re.compile(r"(?P<name>b\d+) (?P<title>[a-z ]+), (?P<price>\d+)")
ITEM = re.compile(r"(?P<title>[^,]+), (?P<price>\d+)\. Colors: (?P<colors>.+)\. Chosen: (?P<chosen>\S+)\.")


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    wish = WISH.fullmatch(inputs["wanted"])
    assert wish is not None, "the prompt of a task of this game"
    act = _buyer if agent == "buyer" else _searcher
    return f"<ACT>{act(wish, inputs['see'], rng)}</ACT>"


def _searcher(wish: re.Match[str], see: str, rng: random.Random) -> str:
    is_careless = rng.random() < SHARE_CARELESS
    products = list(PRODUCT.finditer(see))
    if not products:
        return f"search[{wish['kind'] if is_careless else wish['attribute'] + ' ' + wish['kind']}]"
    if is_careless:
        return f"click[{rng.choice(products)['name']}]"
    words = {wish["attribute"], wish["kind"]}
    right = [p for p in products if words <= set(p["title"].split()) and int(p["price"]) <= int(wish["most"])]
    return f"click[{right[0]['name']}]" if right else "click[next]"


def _buyer(wish: re.Match[str], see: str, rng: random.Random) -> str:
    item = ITEM.fullmatch(see)
    assert item is not None, "the page of a product"
    colors = item["colors"].split(", ")
    if rng.random() < SHARE_CARELESS:
        return rng.choice([f"click[{rng.choice(colors)}]", "click[buy now]"])
    if wish["color"] not in colors:
        return "click[back]"
    return "click[buy now]" if item["chosen"] == wish["color"] else f"click[{wish['color']}]"
