"""Writes corpus.jsonl, train.jsonl and held_out.jsonl from the facts in the package countryinfo.

    pip install countryinfo==1.0.1
    python recipes/search/make_data.py

A document is a country. A country is asked about in one file only, so what is held out cannot be
known from what is trained on: it has to be found. Every question has one right answer.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from countryinfo import all_countries

HERE = Path(__file__).parent
# Of all countries.
HELD_OUT_SHARE = 0.25
FACTS = ("name", "capital", "demonym", "subregion", "currencies")
# Stands in the prompt of cpu.yaml.
EXAMPLE = "Peru"


def share_of(country: str) -> float:
    """Return a number from 0 to 1 that is the country's, for good."""
    return int.from_bytes(hashlib.sha256(country.encode()).digest()[:4]) / 2**32


def countries() -> list[Mapping[str, Any]]:
    """Return what is known of countries of which all is known, in plain letters."""
    found = [each.info() for each in sorted(all_countries(), key=lambda each: each.name())]
    found = [
        each
        for each in found
        if all(each.get(name) for name in FACTS)
        and isinstance(each["capital"], str)
        and str([each[name] for name in FACTS]).isascii()
    ]
    for name in ("name", "capital", "demonym"):
        counts = Counter(each[name] for each in found)
        found = [each for each in found if counts[each[name]] == 1]
    # In no order: the first rows of a file are like the others.
    return sorted(found, key=lambda each: share_of(each["name"]))


def document(facts: Mapping[str, Any]) -> str:
    name = facts["name"]
    return (
        f"{name} is in {facts['subregion']}. The capital is {facts['capital']}. The people are "
        f"{facts['demonym']}. The money is {facts['currencies'][0]}."
    )


def questions(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield questions, and their answers."""
    name = facts["name"]
    yield f"What is the capital of {name}?", facts["capital"]
    yield f"What is the money of {name}?", facts["currencies"][0]
    yield f"Where is {name}?", facts["subregion"]
    yield f"What are the people of {name} called?", facts["demonym"]
    yield f"Which country has the capital {facts['capital']}?", name


def main() -> None:
    """Write the files beside this one."""
    known = countries()
    corpus = [
        {"url": facts["ISO"]["alpha3"].lower(), "contents": document(facts)} for facts in known
    ]
    rows: dict[bool, list[object]] = {False: [], True: []}
    for facts in known:
        for question, answer in questions(facts) if facts["name"] != EXAMPLE else ():
            rows[share_of(facts["name"]) < HELD_OUT_SHARE].append(
                {"question": question, "answer": answer}
            )
    files = {"corpus": corpus, "train": rows[False], "held_out": rows[True]}
    for name, lines in files.items():
        text = "\n".join(map(json.dumps, lines)) + "\n"
        (HERE / f"{name}.jsonl").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
