"""The task of the sort recipe: its prompts and its scorer."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from letter_sort import LetterSort

from astraflow.config.recipe import Recipe
from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt

Row = Mapping[str, Any]


class SortTask:
    """Prompts of a recipe, and what an answer earns."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._score = LetterSort(LetterSort.Options())

    def draws(self, name: str) -> Iterator[Row]:
        """Yield the rows of a data set for ever, shuffled anew for each pass by the seed."""
        rows = list(self._rows(name))
        rng = np.random.default_rng(self._recipe.seed)
        while True:
            for index in rng.permutation(len(rows)):
                yield rows[index]

    def first(self, name: str, count: int) -> list[Row]:
        """Return the first rows of a data set."""
        return list(islice(self._rows(name), count))

    def rewards(self, rows: Sequence[Row], answers: Iterable[str]) -> np.ndarray:
        """Return f64[n], what answers earn."""
        return np.array(
            [
                self._score(
                    Prompt(prompt_id=PromptId(row["id"]), data_set="", fields=row), answer
                ).reward
                for row, answer in zip(rows, answers, strict=True)
            ]
        )

    def _rows(self, name: str) -> Iterator[Row]:
        yield from map(json.loads, self._recipe.data[name].path.read_text().splitlines())
