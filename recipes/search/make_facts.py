"""Writes a corpus about countries, and questions about them: `make_facts.py`; needs countryinfo.

Beside this file: corpus.jsonl, a document a country; train.jsonl and held_out.jsonl, questions
about some countries and about the others.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_HELD_OUT = 0.2


def countries() -> list[dict[str, Any]]:
    """Return what is known of each country that has a capital and a name for its people."""
    library: Any = import_module("countryinfo")
    known = {each.iso(3): each for each in library.all_countries()}
    found: list[dict[str, Any]] = []
    for each in known.values():
        if not (each.capital() and each.demonym() and each.area()):
            continue
        borders = [known[code].name() for code in each.borders() or () if code in known]
        found.append(
            {
                "name": each.name(),
                "capital": each.capital(),
                "people": each.demonym(),
                "region": each.subregion() or each.region(),
                "area": round(each.area()),
                "borders": borders,
            }
        )
    # A question has one answer.
    for key in ("name", "capital", "people"):
        counts = Counter(country[key] for country in found)
        found = [country for country in found if counts[country[key]] == 1]
    return sorted(found, key=lambda country: country["name"])


def document(country: Mapping[str, Any]) -> dict[str, str]:
    """Return what the corpus says of a country."""
    borders = ", ".join(country["borders"]) or "no other country"
    contents = (
        f"{country['name']} is a country in {country['region']}. Its capital is "
        f"{country['capital']}. Its people are called {country['people']}. It has an area of "
        f"{country['area']} square kilometres. It borders {borders}."
    )
    return {"url": f"facts/{country['name'].lower().replace(' ', '-')}", "contents": contents}


def questions(country: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return questions about a country, each for one document."""
    name, capital, people = country["name"], country["capital"], country["people"]
    pairs = [
        (f"What is the capital of {name}?", capital),
        (f"Which country has the capital {capital}?", name),
        (f"In which country are the people called {people}?", name),
        (f"What is the capital of the country whose people are called {people}?", capital),
    ]
    return [
        {"id": f"{name}/{number}", "question": question, "answer": answer}
        for number, (question, answer) in enumerate(pairs)
    ]


def write(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows beside this file."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    Path(__file__).with_name(name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Write the three files."""
    found = countries()
    write("corpus.jsonl", map(document, found))
    mixed = random.Random(0).sample(found, len(found))  # noqa: S311 - rows are no secrets
    count = round(len(mixed) * _HELD_OUT)
    for name, part in (("held_out.jsonl", mixed[:count]), ("train.jsonl", mixed[count:])):
        write(name, (row for country in part for row in questions(country)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
