"""Writes products.jsonl, a shop that nobody runs: `make_products.py [COUNT] [SEED]`."""

import json
import random
import sys
from pathlib import Path

# By what is searched for: the category above it, attributes, options.
GOODS = {
    "running shoes": (
        "shoes",
        ["non slip", "memory foam", "arch support", "quick drying", "vegan leather"],
        {"color": ["black", "white", "navy blue", "red"], "size": ["7", "8", "9", "10"]},
    ),
    "winter boots": (
        "shoes",
        ["waterproof", "fur lined", "steel toe", "non slip", "slim fit"],
        {"color": ["brown", "black", "grey"], "size": ["7", "8", "9", "10"]},
    ),
    "rain jacket": (
        "clothing",
        ["waterproof", "machine wash", "light weight", "hooded", "long sleeve"],
        {"color": ["yellow", "green", "navy blue"], "size": ["small", "medium", "large"]},
    ),
    "wool sweater": (
        "clothing",
        ["hand wash", "long sleeve", "high neck", "soft material", "slim fit"],
        {"color": ["beige", "red", "forest green"], "size": ["small", "medium", "large"]},
    ),
    "desk lamp": (
        "lighting",
        ["energy efficient", "easy assemble", "dimmable", "space saving", "solid wood"],
        {"color": ["white", "silver", "black"], "light": ["warm", "cold"]},
    ),
    "floor lamp": (
        "lighting",
        ["energy efficient", "solid wood", "glass shade", "dimmable", "easy clean"],
        {"color": ["gold", "black", "walnut"], "light": ["warm", "cold"]},
    ),
    "green tea": (
        "groceries",
        ["sugar free", "certified organic", "caffeine free", "gluten free", "hand picked"],
        {"flavor": ["mint", "lemon", "jasmine"], "pack": ["20 bags", "50 bags"]},
    ),
    "trail mix": (
        "groceries",
        ["sugar free", "non gmo", "gluten free", "low sodium", "resealable bag"],
        {"flavor": ["cranberry", "cashew", "dark chocolate"], "pack": ["200 g", "500 g"]},
    ),
}
BRANDS = ["Alder", "Brook", "Cinder", "Dale", "Elm", "Fjord", "Glen", "Heath", "Isle", "Juniper"]


def products(count: int, rng: random.Random) -> list[dict[str, object]]:
    """Return so many products, every kind as often as another."""
    made: list[dict[str, object]] = []
    for number in range(count):
        query = list(GOODS)[number % len(GOODS)]
        category, attributes, options = GOODS[query]
        mine = sorted(rng.sample(attributes, 3))
        # One of its attributes stands in the title, the rest has to be read.
        brand = rng.choice(BRANDS)
        offered = {
            name: sorted(rng.sample(values, rng.randint(2, len(values))), key=values.index)
            for name, values in options.items()
        }
        made.append(
            {
                "id": f"B{number:04d}",
                "query": query,
                "category": [category, query],
                "title": f"{brand} {query}, {mine[0]}",
                "price": rng.randint(5, 120) + 0.99,
                "attributes": mine,
                "features": [f"It is {each}." for each in mine],
                "description": f"For every day: {query}, by {brand}.",
                "options": offered,
            }
        )
    return made


def main() -> None:
    """Write the file beside this one."""
    count, seed = (*map(int, sys.argv[1:]), *(200, 0)[len(sys.argv) - 1 :])
    lines = [json.dumps(each) for each in products(count, random.Random(seed))]  # noqa: S311
    Path(__file__).with_name("products.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
