"""world: a web shop after WebShop (Yao et al. 2022, arXiv 2207.01206): search, click, buy; the catalogue and the wish come from seeds.

    search[cotton shirt]     click[b12]     click[next]     click[back]     click[red]     click[buy now]

The reward comes with the purchase and ends the visit (WebShop, equation 1):

    r = r_type * (attributes that match + options that match + 1[price <= the most]) / (wanted attributes + wanted options + 1)

r_type is 1 for a product of the wanted kind, else 0. The search is LanceDB's full-text search (BM25).
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from stores.traces.corpus import Corpus, build_corpus

KINDS = ("shirt", "lamp", "mug", "bag", "chair", "rug")
ATTRIBUTES = ("soft", "cotton", "light", "large", "small", "round", "steel", "old")
COLORS = ("red", "blue", "green", "black", "white")
PAGE_SIZE, NUM_FOUND = 3, 12
"""Products of a page of results, and of all of them."""
NUM_PRODUCTS = 120
ACTION = re.compile(r"(search|click)\[(.+)\]")


@dataclass(frozen=True)
class Product:
    """A product of the catalogue."""

    name: str
    """What is clicked on: `b` and a number."""
    kind: str
    attributes: tuple[str, ...]
    colors: tuple[str, ...]
    price: int

    @property
    def title(self) -> str:
        """What is searched, and shown."""
        return f"{' '.join(self.attributes)} {self.kind}"


@dataclass(frozen=True)
class Wish:
    """What shall be bought."""

    kind: str
    attribute: str
    color: str
    most: int
    """The highest price."""

    def __str__(self) -> str:
        """As agents read it."""
        return f"{self.attribute} {self.kind}, {self.color}, at most {self.most}"

    def value_of(self, product: Product, chosen: str) -> float:
        """The reward of buying a product in a chosen color."""
        if product.kind != self.kind:
            return 0.0
        return ((self.attribute in product.attributes) + (chosen == self.color) + (product.price <= self.most)) / 3


@cache
def make_catalogue(seed: int) -> tuple[Product, ...]:
    """Returns the products of a seed; the same on any machine."""
    dice = random.Random(f"catalogue/{seed}")
    return tuple(
        Product(
            name=f"b{number}",
            kind=KINDS[number % len(KINDS)],
            attributes=tuple(sorted(dice.sample(ATTRIBUTES, 2))),
            colors=tuple(sorted(dice.sample(COLORS, 3))),
            price=dice.randint(10, 99),
        )
        for number in range(NUM_PRODUCTS)
    )


def make_wish(seed: int, catalogue: int) -> Wish:
    """Returns a wish that some product of the catalogue fulfils."""
    dice = random.Random(f"wish/{catalogue}/{seed}")
    product = dice.choice(make_catalogue(catalogue))
    most = product.price + dice.randint(0, 9)
    return Wish(product.kind, dice.choice(product.attributes), dice.choice(product.colors), most)


@cache
def _index(catalogue: int) -> tuple[tempfile.TemporaryDirectory[str], Corpus]:
    """Returns a full-text index of a catalogue's titles, and the folder that it lives in as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="troupe-shop-")
    lines = [json.dumps({"id": p.name, "contents": p.title}) for p in make_catalogue(catalogue)]
    rows = Path(folder.name) / "products.jsonl"
    rows.write_text("\n".join(lines))
    build_corpus(folder.name, rows)
    return folder, Corpus(folder.name)


def find(catalogue: int, words: str) -> list[Product]:
    """Returns the products that match these words best, best first; equally good ones in the order of the catalogue."""
    products = {product.name: product for product in make_catalogue(catalogue)}
    (hits,) = _index(catalogue)[1].search([words], len(products))
    numbers = {name: number for number, name in enumerate(products)}
    best = sorted(hits, key=lambda document: (-round(document.score, 4), numbers[document.document_id]))
    return [products[document.document_id] for document in best[:NUM_FOUND]]


class Shop:
    """A visit to the shop. `reset` and `step` return what a world returns."""

    def __init__(self, seed: int, catalogue: int = 0) -> None:
        """Args: seed: of the wish. catalogue: seed of the products."""
        self.catalogue, self.wish = catalogue, make_wish(seed, catalogue)
        self.results: list[Product] = []
        self.first = 0
        """The number of the first product of the page of results."""
        self.item: Product | None = None
        self.chosen = ""
        self.is_over = False

    def reset(self) -> dict[str, Any]:
        """Returns the page with the search field."""
        return self._shown(0.0)

    def step(self, action: str) -> dict[str, Any]:
        """Does what `action` says, and returns the page then; where it is not possible, the same page."""
        match = ACTION.fullmatch(" ".join(action.lower().split()))
        verb, what = (match[1], match[2].strip()) if match else ("", "")
        reward = 0.0
        if verb == "search" and self.item is None:
            self.results, self.first = find(self.catalogue, what), 0
        elif verb != "click" or not self._click(what):
            return self._shown(0.0)
        elif what == "buy now":
            assert self.item is not None
            reward, self.is_over = self.wish.value_of(self.item, self.chosen), True
        return self._shown(reward)

    def _click(self, what: str) -> bool:
        """Whether there is such a thing to click on."""
        page = {product.name: product for product in self._page}
        if self.item is not None:
            is_there = what in ("back", "buy now", *self.item.colors)
            if what == "back":
                self.item, self.chosen = None, ""
            elif what in self.item.colors:
                self.chosen = what
            return is_there
        if what in page:
            self.item = page[what]
        elif what == "next" and self.first + PAGE_SIZE < len(self.results):
            self.first += PAGE_SIZE
        else:
            return False
        return True

    @property
    def _page(self) -> Sequence[Product]:
        return self.results[self.first : self.first + PAGE_SIZE]

    def _shown(self, reward: float) -> dict[str, Any]:
        return {
            "text": self._text(),
            "reward": reward,
            "is_done": self.is_over,
            "info": {"page": "item" if self.item else "results" if self.results else "search", "is_won": reward == 1.0},
            "anchor": self._anchor(),
        }

    def _text(self) -> str:
        if self.is_over:
            return "Thank you."
        if self.item is not None:
            chosen = self.chosen or "none"
            return f"{self.item.title}, {self.item.price}. Colors: {', '.join(self.item.colors)}. Chosen: {chosen}."
        if not self.results:
            return "Search."
        return "; ".join(f"{product.name} {product.title}, {product.price}" for product in self._page) + "."

    def _anchor(self) -> str:
        state: Mapping[str, Any] = {
            "page": [product.name for product in self._page],
            "item": self.item.name if self.item else "",
            "chosen": self.chosen,
            "is_over": self.is_over,
        }
        return sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]
