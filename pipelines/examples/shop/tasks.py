"""tasks: seed, split, count -> wishes, each of which some product of the catalogue fulfils; no two splits share a wish.

`demonstrate`: agent, task, inputs -> a completion: it plays searcher and buyer as somebody would who knows the shop and is careless.
The searcher leaves the attribute out of its words, or takes the first product. The buyer takes the wrong color, or buys before it has
chosen one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from pipelines.examples.shop.world import make_wish
from pipelines.tasks.splits import part_of
from stores.types import FAMILY, Task

SHARES = {"train": 0.55, "gate": 0.2, "test": 0.2, "sentinel": 0.05}
"""Approximate share of all wishes, whatever their highest price, in each split."""
MAX_SEED = 10**9


def generate(*, seed: int, split: str, count: int, catalogue: int = 0) -> list[Task]:
    """Returns `count` tasks of `split`, wishes of products of one catalogue.

    Raises ValueError for an unknown split, or more tasks than can be drawn.
    """
    if split not in SHARES:
        raise ValueError(f"shop: split {split!r} does not exist: use one of {', '.join(SHARES)}")
    dice = random.Random(f"{seed}/{split}")
    tasks: dict[str, Task] = {}
    for _ in range(60 * count):
        number = dice.randrange(MAX_SEED)
        wish = make_wish(number, catalogue)
        family = f"{catalogue}/{wish.kind}/{wish.attribute}/{wish.color}"
        if part_of(family, SHARES, rest="train") == split:
            metadata = {"seed": number, "catalogue": catalogue, FAMILY: family}
            task = Task(
                task_id=f"shop-{catalogue}-{wish.kind}-{wish.attribute}-{wish.color}-{wish.most}",
                prompt=str(wish),
                answers=("1",),
                source="shop",
                metadata=metadata,
            )
            tasks.setdefault(task.task_id, task)
        if len(tasks) == count:
            return list(tasks.values())
    raise ValueError(
        f"shop: split {split!r} gave {len(tasks)} tasks of {count}: lower `count`, or use another catalogue, too"
    )


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
