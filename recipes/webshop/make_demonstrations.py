"""Writes demonstrations.jsonl: chats of a sloppy shopper with the shop.

    python recipes/webshop/make_demonstrations.py

It often searches without the attributes, looks at any product, and forgets options or takes wrong
ones; what it buys is exactly what was asked for in about one errand of six.
"""

import json
import random
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from shop import Shop, reward_of  # noqa: E402 - lies beside this file

COUNT = 300
# Those of cpu.yaml begin at 0 and 100000.
FIRST_SEED = 200_000


def errand(shop: Shop, seed: int, rng: random.Random) -> tuple[list[dict[str, str]], float]:
    """Return the chat of an errand, and its reward."""
    chat = [{"role": "user", "content": shop.reset({}, seed)}]
    goal = shop.goal
    attributes = " ".join(goal["attributes"]) + " " if rng.random() < 0.6 else ""
    actions = [f"search[{attributes}{goal['query']}]"]
    reward = 0.0
    while actions:
        action = actions.pop(0)
        step = shop.step(action)
        chat.append({"role": "assistant", "content": action})
        if step.is_done:
            reward = step.reward
            break
        chat.append({"role": "user", "content": step.observation})
        if action.startswith("search"):
            actions = _choices(shop, step.observation, rng)
    return chat, reward


def _choices(shop: Shop, page: str, rng: random.Random) -> list[str]:
    """Return what is clicked from the first page of results on."""
    goal = shop.goal
    numbers = re.findall(r"^\[(\d)\]", page, re.MULTILINE)
    products = {number: shop.results[int(number) - 1] for number in numbers}
    shown = list(products)
    best = max(shown, key=lambda each: reward_of(goal, products[each], goal["options"])["reward"])
    chosen = rng.choice(shown) if rng.random() < 0.5 else best
    clicks = [chosen]
    for name, wish in goal["options"].items():
        offered = products[chosen]["options"][name]
        if rng.random() < 0.6:
            is_right = wish in offered and rng.random() < 0.8
            clicks.append(wish if is_right else rng.choice(offered))
    return [f"click[{each}]" for each in [*clicks, "buy now"]]


def main() -> None:
    """Write the file beside this one."""
    rng = random.Random(0)  # noqa: S311
    shop = Shop(per_page=3, pages=1, is_short=True)
    errands = [errand(shop, FIRST_SEED + number, rng) for number in range(COUNT)]
    text = "\n".join(json.dumps({"messages": chat}) for chat, _ in errands) + "\n"
    (HERE / "demonstrations.jsonl").write_text(text, "utf-8")
    rewards = [reward for _, reward in errands]
    exact = sum(reward == 1 for reward in rewards) / COUNT
    print(f"{COUNT} errands, mean reward {sum(rewards) / COUNT:.2f}, exact {exact:.2f}")


if __name__ == "__main__":
    main()
