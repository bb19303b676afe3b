"""A web shop as text, with the actions and the reward of WebShop (Yao et al. 2022).

`search[words]` and `click[button]`; the episode ends at `click[buy now]`. The goal, its attributes,
options and price limit, is drawn by the row's seed from the products.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from astraflow.workflows.environments.protocol import Step

_ACTION = re.compile(r"(search|click)\[([^\]]*)\]", re.IGNORECASE)
_LITTLE_WORDS = frozenset({"a", "an", "and", "by", "every", "for", "in", "is", "of", "the", "with"})
_SIMILAR = 0.85


class Shop:
    """One customer, one errand."""

    def __init__(
        self,
        products: str = "products.jsonl",
        per_page: int = 5,
        pages: int = 3,
        *,
        is_short: bool = False,
    ) -> None:
        """Open the shop; needs bm25s.

        Args:
            products: JSONL, as make_products.py writes it; relative to this file.
            per_page: Products on a page of results.
            pages: Of results at most.
            is_short: For small models: a product is clicked by its number on the page, and pages do
                not end with all that can be clicked.
        """
        bm25s: Any = import_module("bm25s")
        with (Path(__file__).parent / products).open(encoding="utf-8") as file:
            self.products = [json.loads(line) for line in file]
        texts = [
            " ".join([each["title"], each["description"], *each["features"]])
            for each in self.products
        ]
        self._tokens: Any = lambda words: bm25s.tokenize(words, show_progress=False)
        self._index: Any = bm25s.BM25()
        self._index.index(self._tokens(texts), show_progress=False)
        self._per_page, self._most = per_page, min(per_page * pages, len(texts))
        self._is_short = is_short
        self.goal: Mapping[str, Any] = {}
        self._begin()

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Say what is wanted; a row may have the whole `goal`."""
        self.goal = task.get("goal") or self._drawn(random.Random(seed))  # noqa: S311
        self._begin()
        return self._page(self.goal["instruction"])

    def step(self, action: str) -> Step:
        """Search or click; anything else is told to be neither."""
        found = _ACTION.search(action)
        if found is None:
            return Step(self._page("Write search[words] or click[button]."))
        kind, words = found.group(1).lower(), found.group(2).strip().lower()
        if kind == "search":
            if self._product is not None or self.results:
                return Step(self._page("Click back to search first."))
            return self._search(words)
        if words not in self._buttons():
            return Step(self._page(f"There is no button {words}."))
        return self._click(words)

    def close(self) -> None:
        """Nothing to let go of."""

    def _begin(self) -> None:
        self.results: list[Mapping[str, Any]] = []
        self._first = 0
        self._product: Mapping[str, Any] | None = None
        self._chosen: dict[str, str] = {}
        self._details = ""

    def _drawn(self, rng: random.Random) -> Mapping[str, Any]:
        product = rng.choice(self.products)
        options = {name: rng.choice(values) for name, values in product["options"].items()}
        attributes = rng.sample(product["attributes"], 2)
        limit = 10 * (int(product["price"]) // 10 + rng.randint(1, 3))
        wishes = ", ".join(f"{name}: {value}" for name, value in options.items())
        return {
            **{name: product[name] for name in ("query", "category", "title")},
            "attributes": attributes,
            "options": options,
            "price": limit,
            "instruction": f"Find me {' '.join(attributes)} {product['query']} with {wishes}, and "
            f"price lower than {limit}.00 dollars.",
        }

    def _search(self, words: str) -> Step:
        numbers, scores = self._index.retrieve(
            self._tokens([words]), k=self._most, show_progress=False
        )
        found = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
        self.results = [self.products[number] for number, score in found if score > 0]
        return Step(self._page("" if self.results else "Nothing was found."))

    def _click(self, button: str) -> Step:
        product = self._product
        match button:
            case "buy now" if product is not None:
                parts = reward_of(self.goal, product, self._chosen)
                return Step("", parts["reward"], is_done=True, metrics=parts)
            case "back to search":
                self._begin()
            case "next >":
                self._first += self._per_page
            case "< prev" if product is not None:
                self._product, self._details = None, ""
            case "< prev":
                self._first -= self._per_page
            case "description" | "features" if product is not None:
                said = product[button]
                self._details = said if isinstance(said, str) else " ".join(said)
            case _ if product is not None:
                # An option, which belongs to one name alone.
                name = next(key for key, values in product["options"].items() if button in values)
                self._chosen[name] = button
            case _:
                shown = {name.lower(): each for name, each in self._shown().items()}
                self._product, self._chosen, self._details = shown[button], {}, ""
        return Step(self._page(""))

    def _buttons(self) -> Sequence[str]:
        if self._product is not None:
            offered = [each for values in self._product["options"].values() for each in values]
            return ["back to search", "< prev", "description", "features", *offered, "buy now"]
        if not self.results:
            return []
        shown = self._shown()
        turns = ["< prev"] * (self._first > 0)
        turns += ["next >"] * (self._first + len(shown) < len(self.results))
        return ["back to search", *turns, *(name.lower() for name in shown)]

    def _shown(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the products of the page, by what is clicked."""
        page = self.results[self._first : self._first + self._per_page]
        names = map(str, range(1, len(page) + 1)) if self._is_short else (x["id"] for x in page)
        return dict(zip(names, page, strict=True))

    def _page(self, said: str) -> str:
        """Return what the customer sees, and what can be clicked."""
        lines = [said] if said else []
        product = self._product
        if product is not None:
            lines.append(f"{product['title']}, {product['price']:.2f} dollars")
            lines += [
                f"{name}: {', '.join(values)}"
                + (f" (chosen: {self._chosen[name]})" if name in self._chosen else "")
                for name, values in product["options"].items()
            ]
            lines += [self._details] if self._details else []
        else:
            lines += [
                f"[{name}] {each['title']}, {each['price']:.2f}"
                for name, each in self._shown().items()
            ]
        if self._is_short:
            return "\n".join(lines)
        can = [f"click[{button}]" for button in self._buttons()] or ["search[words]"]
        return "\n".join([*lines, f"You can: {', '.join(can)}"])


def reward_of(
    goal: Mapping[str, Any], product: Mapping[str, Any], chosen: Mapping[str, str]
) -> dict[str, float]:
    """Return the reward of a purchase and its parts.

    The kind of product times (attributes hit + options hit + [price in limit]) / (attributes +
    options + 1), where an attribute that the product is not said to have may stand in its texts;
    without a price limit the last part is left out on both sides.
    """
    texts = " ".join([product["title"], product["description"], *product["features"]]).lower()
    hit_attributes = sum(
        any(_is_like(wish, each) for each in product["attributes"]) or wish.lower() in texts
        for wish in goal["attributes"]
    )
    hit_options = sum(
        any(_is_like(wish, each) for each in chosen.values()) for wish in goal["options"].values()
    )
    limit = goal.get("price")
    in_limit = [] if limit is None else [float(product["price"] <= limit)]
    hits = hit_attributes + hit_options + sum(in_limit)
    share = hits / (len(goal["attributes"]) + len(goal["options"]) + len(in_limit))
    kind = kind_of(goal, product)
    return {
        "reward": kind * share,
        "kind": kind,
        "attributes": hit_attributes / max(len(goal["attributes"]), 1),
        "options": hit_options / max(len(goal["options"]), 1),
        "price": sum(in_limit, 0.0),
    }


def kind_of(goal: Mapping[str, Any], product: Mapping[str, Any]) -> float:
    """Return what a product of this kind is worth: 1, .5, .1 or 0."""
    wanted = _words(goal["title"])
    common = len(wanted & _words(product["title"])) / max(len(wanted), 1)
    is_match = (
        goal["query"] == product["query"]
        or len({*goal["category"]} & {*product["category"]}) >= 2
        or common > 0.2
    )
    if common == 0:
        return 0.0
    if common < 0.1:
        return 0.1
    return 1.0 if is_match else 0.5


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower())) - _LITTLE_WORDS


def _is_like(one: str, other: str) -> bool:
    """Whether two texts have nearly the same words, in any order (token set ratio)."""
    mine, theirs = _words(one), _words(other)
    common = " ".join(sorted(mine & theirs))
    rests = (" ".join(sorted(rest)) for rest in (mine - theirs, theirs - mine))
    pairs = combinations([common, *(f"{common} {rest}".strip() for rest in rests)], 2)
    return any(a and b and SequenceMatcher(None, a, b).ratio() > _SIMILAR for a, b in pairs)
