"""A shop desk with tools: questions that cannot be answered without calling them.

Prices and stocks are drawn anew for every task, so nothing can be learned by heart: the policy
calls a function, reads what it returned, may call another one with it, and answers. An answer
without a call is the end of the episode; the last number in it counts.
"""

import json
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astraflow.workflows.environments.protocol import Step

# A long word without a bracket is read once, and so is what follows a call that is not closed.
_PYTHON = re.compile(r"(?<![a-z_])([a-z_]+)\(([^()\n]*)\)")
_JSON = re.compile(r"<tool_call>\s*(\{(?:(?!<tool_call>).)*?\})\s*</tool_call>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+")
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "times": operator.mul,
    "plus": operator.add,
    "minus": operator.sub,
}
WORDINGS: Mapping[str, Sequence[str]] = {
    "price": (
        "What does a {item} cost?",
        "How much is a {item}?",
        "Tell me the price of a {item}.",
    ),
    "stock": (
        "How many {item}s are left?",
        "Count the {item}s on the shelf.",
        "Do you have {item}s, and how many?",
    ),
    "total": (
        "What do {count} {item}s cost?",
        "I take {count} {item}s. How much is it?",
        "Tell me the price of {count} {item}s.",
    ),
    "both": (
        "What do a {item} and a {other} cost together?",
        "I take a {item} and a {other}. How much is it?",
    ),
    "change": (
        "I pay a {item} with {paid} dollars. How much do I get back?",
        "How much is left of {paid} dollars after I buy a {item}?",
    ),
    "rest": (
        "I buy {count} {item}s. How many are left then?",
        "How many {item}s remain when {count} are sold?",
    ),
}
"""Kinds of questions, and how they are asked."""


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments, as the policy wrote them."""

    name: str
    arguments: tuple[str | int, ...]


@dataclass(slots=True)
class Task:
    """One question.

    Attributes:
        calls: What has to be called, in an order that works.
        answer: The number that is asked for.
    """

    question: str
    price: dict[str, int]
    stock: dict[str, int]
    calls: list[Call] = field(default_factory=list[Call])
    answer: int = 0


def task_of(row: Mapping[str, Any], seed: int) -> Task:
    """Return the task of a row {kind, item, other?, count?}; the seed draws numbers and words."""
    rng = random.Random(seed)  # noqa: S311
    item, count = row["item"], int(row.get("count", 2))
    names = [item, row["other"]] if "other" in row else [item]
    task = Task(
        question="",
        price={name: rng.randint(2, 9) for name in names},
        stock={name: rng.randint(12, 60) for name in names},
    )
    cost, paid = task.price[item], rng.choice([10, 20, 50])
    of_price, of_stock = Call("price", (item,)), Call("stock", (item,))
    match row["kind"]:
        case "price":
            task.calls, task.answer = [of_price], cost
        case "stock":
            task.calls, task.answer = [of_stock], task.stock[item]
        case "total":
            task.calls = [of_price, Call("times", (count, cost))]
            task.answer = count * cost
        case "both":
            other = task.price[row["other"]]
            task.calls = [of_price, Call("price", (row["other"],)), Call("plus", (cost, other))]
            task.answer = cost + other
        case "change":
            task.calls = [of_price, Call("minus", (paid, cost))]
            task.answer = paid - cost
        case "rest":
            task.calls = [of_stock, Call("minus", (task.stock[item], count))]
            task.answer = task.stock[item] - count
        case kind:
            raise ValueError(f"kind '{kind}' is none of {', '.join(WORDINGS)}")
    words = {"item": item, "other": row.get("other", ""), "count": count, "paid": paid}
    task.question = rng.choice(WORDINGS[row["kind"]]).format(**words)
    return task


def read_call(text: str, style: str) -> Call | str | None:
    """Return the call in what the policy wrote, or what is wrong with it; None: an answer."""
    if style == "python":
        found = _PYTHON.search(text)
        if found is None:
            return None
        words = [each.strip().strip("'\"") for each in found.group(2).split(",")]
        return Call(found.group(1), tuple(_value(word) for word in words))
    found = _JSON.search(text)
    if found is None:
        return None
    try:
        told = json.loads(found.group(1))
        arguments = told["arguments"]
        return Call(str(told["name"]), tuple(_value(str(each)) for each in arguments.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "error: write {name, arguments} as JSON"


def write_call(call: Call, style: str) -> str:
    """Return a call as the policy should write it."""
    if style == "python":
        return f"{call.name}({', '.join(map(str, call.arguments))})"
    names = ("item",) if call.name in ("price", "stock") else ("a", "b")
    told = {"name": call.name, "arguments": dict(zip(names, call.arguments, strict=True))}
    return f"<tool_call>\n{json.dumps(told)}\n</tool_call>"


def _value(word: str) -> str | int:
    try:
        return int(float(word))
    except (ValueError, OverflowError):
        return word


class ToolDesk:
    """Plays one task: calls are executed, an answer is judged.

    The reward is `call_share` times the share of the needed calls that were made, right to the
    argument, and the rest for the right answer; but nothing beyond the calls for a right answer
    that was guessed without them.
    """

    def __init__(self, style: str = "python", call_share: float = 0.2) -> None:
        """Open the desk.

        Args:
            style: How calls are written: python, `price(lamp)`; or json, the <tool_call> of Qwen
                and Hermes.
            call_share: What the right calls are worth; the answer is worth the rest.
        """
        if style not in ("python", "json"):
            raise ValueError(f"style '{style}' is none of python, json")
        self._style, self._call_share = style, call_share
        self._task = Task("", {}, {})
        self._open: list[Call] = []
        self._wrong = 0

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Ask the question."""
        self._task = task_of(task, seed)
        self._open = list(self._task.calls)
        self._wrong = 0
        return self._task.question

    def step(self, action: str) -> Step:
        """Execute a call, or judge an answer."""
        call = read_call(action, self._style)
        if call is None:
            return self._judge(action)
        result = call if isinstance(call, str) else self._execute(call)
        reward = 0.0
        if call in self._open:
            self._open.remove(call)
            reward = self._call_share / len(self._task.calls)
        else:
            self._wrong += 1
        return Step([{"role": "tool", "content": str(result)}], reward, metrics=self._measures())

    def close(self) -> None:
        """Nothing to let go of."""

    def _judge(self, answer: str) -> Step:
        numbers = _NUMBER.findall(answer)
        # No int: that refuses a number of more than 4,300 digits.
        is_right = bool(numbers) and float(numbers[-1]) == self._task.answer and not self._open
        reward = (1 - self._call_share) * is_right
        return Step("", reward, is_done=True, metrics=self._measures(is_right=is_right))

    def _execute(self, call: Call) -> int | str:
        table = {"price": self._task.price, "stock": self._task.stock}.get(call.name)
        match call.arguments:
            case (str() as item,) if table is not None:
                return table.get(item, f"error: no {item} here")
            case (int() as a, int() as b) if call.name in _ARITHMETIC:
                return _ARITHMETIC[call.name](a, b)
            case _ if table is not None or call.name in _ARITHMETIC:
                return f"error: wrong arguments for {call.name}"
            case _:
                return f"error: no tool {call.name}"

    def _measures(self, *, is_right: bool = False) -> dict[str, float]:
        needed = len(self._task.calls)
        return {
            "right_answer": float(is_right),
            "right_calls": (needed - len(self._open)) / max(needed, 1),
            "wrong_calls": float(self._wrong),
        }
