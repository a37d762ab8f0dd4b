"""The shop game: its pages, its reward, and wishes that no two splits share."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipelines.examples.shop.tasks import SHARES, demonstrate, generate
from pipelines.examples.shop.world import PAGE_SIZE, Shop, find, make_catalogue, make_wish
from pipelines.tasks.splits import settings_of
from stores.types import Task

pytestmark = pytest.mark.fast


class Careful(random.Random):
    """A demonstrator's chance that never strikes."""

    def random(self) -> float:
        return 1.0


def play(task: Task, dice: random.Random, *, max_steps: int = 8) -> list[dict[str, Any]]:
    shop = Shop(**settings_of(task))
    seen = [shop.reset()]
    while not seen[-1]["is_done"] and len(seen) <= max_steps:
        agent = "buyer" if seen[-1]["info"]["page"] == "item" else "searcher"
        seen.append(shop.step(demonstrate(agent, task, {"wanted": task.prompt, "see": seen[-1]["text"]}, dice)[5:-6]))
    return seen


def test_who_makes_no_mistake_buys_what_is_wanted_mostly() -> None:
    played = [play(task, Careful()) for task in generate(seed=0, split="train", count=100)]
    returns = [sum(shown["reward"] for shown in seen) for seen in played]
    assert sum(value == 1.0 for value in returns) > 70
    assert 3.5 < sum(len(seen) - 1 for seen in played) / 100 < 6


def test_a_careless_player_has_room_to_improve() -> None:
    tasks = generate(seed=0, split="train", count=200)
    returns = [sum(shown["reward"] for shown in play(task, random.Random(n))) for n, task in enumerate(tasks)]
    assert 0.45 < sum(returns) / len(returns) < 0.8


def test_the_reward_is_webshops() -> None:
    wish = make_wish(4, 0)
    product = next(p for p in make_catalogue(0) if p.kind == wish.kind and wish.attribute in p.attributes)
    worth = wish.value_of(product, wish.color)
    assert worth == pytest.approx((1 + 1 + (product.price <= wish.most)) / 3)
    assert wish.value_of(product, "") == pytest.approx(worth - 1 / 3)
    other = next(p for p in make_catalogue(0) if p.kind != wish.kind)
    assert wish.value_of(other, wish.color) == 0.0


def test_pages_show_the_best_matches_in_a_fixed_order() -> None:
    found = find(0, "cotton shirt")
    assert found == find(0, "cotton shirt") and {found[0].kind, *found[0].attributes} >= {"shirt", "cotton"}
    shop = Shop(seed=1)
    first = shop.step("search[cotton shirt]")
    assert first["text"].count(";") == PAGE_SIZE - 1 and first["info"]["page"] == "results"
    second = shop.step("click[next]")
    assert second["text"] != first["text"] and second["anchor"] != first["anchor"]
    item = shop.step(f"click[{found[PAGE_SIZE].name}]")
    assert item["text"].startswith(found[PAGE_SIZE].title) and item["info"]["page"] == "item"
    assert shop.step("click[back]")["anchor"] == second["anchor"]


def test_what_is_not_on_the_page_changes_nothing() -> None:
    shop = Shop(seed=1)
    start = shop.reset()
    for action in ("", "buy", "click[buy now]", "click[b1]", "click[next]", "search[]", "search[" + "x" * 5000, "look"):
        assert shop.step(action) == start, action
    shop.step("search[lamp]")
    item = shop.step(f"click[{find(0, 'lamp')[0].name}]")
    for action in ("search[mug]", "click[b1]", "click[gold]", "click[next]"):
        assert shop.step(action) == item, action


def test_splits_share_no_wish_and_what_does_not_exist_is_named() -> None:
    wishes = {
        split: {str(make_wish(**settings_of(t))).rpartition(",")[0] for t in generate(seed=3, split=split, count=30)}
        for split in SHARES
    }
    for split, own in wishes.items():
        assert all(own.isdisjoint(wishes[other]) for other in wishes if other != split)
    with pytest.raises(ValueError, match=r"shop: split 'dev' does not exist: use one of train"):
        generate(seed=0, split="dev", count=1)
    with pytest.raises(ValueError, match=r"shop: split 'sentinel' gave \d+ tasks of 600: lower `count`"):
        generate(seed=0, split="sentinel", count=600)
