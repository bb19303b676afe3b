"""Small functions: problems in the form of HumanEval's, right programs, and a sloppy tutor's.

A problem is a head and a docstring of one or two steps on a number, a text or a list. Whether it is
held out is decided by a digest of its words alone.
"""

import hashlib
import random
from collections.abc import Iterator

HELD_OUT_SHARE = 0.2
RIGHT_SHARE = 0.3

# What a step says, and what it makes of an expression.
Step = tuple[str, str]
CONSTANTS = range(2, 7)
NUMBERS: list[Step] = [
    *((f"add {n}", f"({{}} + {n})") for n in CONSTANTS),
    *((f"subtract {n}", f"({{}} - {n})") for n in CONSTANTS),
    *((f"multiply by {n}", f"({{}} * {n})") for n in CONSTANTS),
    *((f"make it at least {n}", f"max({{}}, {n})") for n in CONSTANTS),
    ("square it", "({} ** 2)"),
]
TEXTS: list[Step] = [
    ("reverse it", "{}[::-1]"),
    ("make it upper case", "{}.upper()"),
    ("repeat it twice", "({} * 2)"),
    *((f"keep the first {n}", f"{{}}[:{n}]") for n in CONSTANTS),
    *((f"drop the first {n}", f"{{}}[{n}:]") for n in CONSTANTS),
]
LISTS: list[Step] = [
    ("sort it", "sorted({})"),
    ("reverse it", "{}[::-1]"),
    *((f"keep the first {n}", f"{{}}[:{n}]") for n in CONSTANTS),
    *((f"drop the first {n}", f"{{}}[{n}:]") for n in CONSTANTS),
]
ENDS: list[Step] = [
    ("return the sum", "sum({})"),
    ("return the length", "len({})"),
]
# Argument, type, steps, and what the tests call the function with.
KINDS: dict[str, tuple[str, str, list[Step], list[object]]] = {
    "number": ("x", "int", NUMBERS, [1, 4, 7, -3]),
    "text": ("s", "str", TEXTS, ["", "pear", "Lemon tea", "abcdefgh"]),
    "list": ("v", "list", LISTS, [[], [3, 1, 2], [5, 9, 2, 2, 7, 1], [4, -1, 8, 0]]),
}
SHARES = {"number": 4, "text": 1, "list": 1}


def head_of(kind: str) -> str:
    argument, type_name, _, _ = KINDS[kind]
    return f"def f({argument}: {type_name}):"


def prompt_of(kind: str, steps: list[Step]) -> str:
    said = ", then ".join(words for words, _ in steps)
    return f'{head_of(kind)}\n    """{said[0].upper()}{said[1:]}."""'


def program_of(kind: str, steps: list[Step]) -> str:
    expression = KINDS[kind][0]
    for _, form in steps:
        expression = form.format(expression)
    if steps[-1][1].startswith("("):
        expression = expression[1:-1]
    return f"{head_of(kind)}\n    return {expression}\n"


def outputs_of(source: str, inputs: list[object]) -> list[object] | None:
    """Return what `f` of a program made here returns; None when it cannot be read or raises."""
    names: dict[str, object] = {}
    try:
        exec(source, names)  # noqa: S102 - programs of this file alone
        return [names["f"](value) for value in inputs]  # type: ignore[operator]
    except (SyntaxError, TypeError, AttributeError):
        return None


def problems(kind: str, rng: random.Random) -> Iterator[list[Step]]:
    """Yield problems without end; every step of a kind is as likely as another."""
    steps = KINDS[kind][2]
    while True:
        chosen = [rng.choice(steps) for _ in range(rng.choice((1, 2, 2, 2)))]
        if kind == "list" and rng.random() < 0.5:
            chosen[-1] = rng.choice(ENDS)
        yield chosen


def is_held_out(prompt: str) -> bool:
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:4]) < HELD_OUT_SHARE * 2**32


def wrong_program(kind: str, steps: list[Step], rng: random.Random) -> str:
    """Return what the tutor writes in a hurry: the right words, put together badly."""
    source = program_of(kind, steps)
    match rng.choice(("left out", "early", "no return", "no colon")):
        case "left out" if len(steps) > 1:
            return program_of(kind, steps[:-1])
        case "early" if len(steps) > 1:
            return program_of(kind, steps[::-1])
        case "no colon":
            return source.replace("):", ")", 1)
        case _:
            return source.replace("return ", "", 1)


def demonstration(kind: str, steps: list[Step], rng: random.Random) -> str:
    """Return a program that is right with RIGHT_SHARE, and as surely wrong otherwise."""
    inputs = KINDS[kind][3]
    right = program_of(kind, steps)
    if rng.random() < RIGHT_SHARE:
        return right
    while True:
        source = wrong_program(kind, steps, rng)
        if outputs_of(source, inputs) != outputs_of(right, inputs):
            return source


def rows_of(*, held_out: bool, seed: int) -> Iterator[tuple[str, list[Step]]]:
    """Yield problems without end, of all kinds by their shares; one may come again."""
    rng = random.Random(seed)  # noqa: S311
    sources = {kind: problems(kind, rng) for kind in KINDS}
    while True:
        for kind, share in SHARES.items():
            right_file = (
                steps for steps in sources[kind] if is_held_out(prompt_of(kind, steps)) == held_out
            )
            yield from ((kind, next(right_file)) for _ in range(share))


def problem_of(kind: str, steps: list[Step]) -> dict[str, object]:
    """Return the row of a problem: its prompt, a solution, and tests of it."""
    solution, inputs = program_of(kind, steps), KINDS[kind][3]
    tests = {
        "fn_name": "f",
        "inputs": [[value] for value in inputs],
        "outputs": outputs_of(solution, inputs),
    }
    return {"prompt": prompt_of(kind, steps), "solution": solution, "tests": tests}


def distinct(
    rows: Iterator[tuple[str, list[Step]]], count: int
) -> Iterator[tuple[str, list[Step]]]:
    seen = set[str]()
    while len(seen) < count:
        kind, steps = next(rows)
        if (prompt := prompt_of(kind, steps)) not in seen:
            seen.add(prompt)
            yield kind, steps
