"""The generators of reasoning-gym: one question, one answer, judged by the generator's scorer."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from astraflow.workflows.environments.protocol import Step

# Rows are made when they are asked for; a seed is the number of one.
_ROW_COUNT = 2**31


class ReasoningGym:
    """Asks row number `seed`; each seed is another row, the same in every process.

    The generators' scorers are made for clean answers: let the workflow's `action` find it in what
    the policy says. A scorer that stumbles over an answer makes it a wrong one.
    """

    def __init__(self, dataset: str, *, exact: bool = False, **settings: Any) -> None:
        """Prepare a generator.

        Args:
            dataset: Its name, such as chain_sum.
            exact: Pay 1 for a perfect answer and 0 for any other. Off: what the scorer says, which
                of some generators is a little for every answer.
            settings: The generator's own.
        """
        rg: Any = import_module("reasoning_gym")
        names: Any = import_module("reasoning_gym.factory").DATASETS
        if dataset not in names:
            raise ValueError(f"dataset: '{dataset}' is none of {', '.join(sorted(names))}")
        self._rows = rg.create_dataset(dataset, **{"size": _ROW_COUNT, "seed": 0, **settings})
        self._exact = exact
        self._row: Any = None

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Return the question."""
        del task
        self._row = self._rows[seed % len(self._rows)]
        return self._row["question"]

    def step(self, action: str) -> Step:
        """Score the answer."""
        try:
            score = float(self._rows.score_answer(action, self._row))
        except Exception:  # noqa: BLE001 - scorers raise anything on text that they cannot read
            score = 0.0
        reward = float(score >= 1) if self._exact else score
        return Step(reward=reward, is_done=True, metrics={"score": score})

    def close(self) -> None:
        """Nothing to let go of."""
