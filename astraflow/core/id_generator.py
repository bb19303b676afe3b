"""Ids of a run, minted from counters, so that a replay mints the same ones."""

from collections import Counter

from astraflow.core.ids import RunId


class IdGenerator:
    """Hands out ids such as `group-<run>-17`, and knows later which ones it handed out.

    What was handed out takes no memory: an id is known by its number.
    """

    def __init__(self, run_id: RunId) -> None:
        self._run_id = run_id
        self._counts = Counter[str]()

    def next(self, kind: str) -> str:
        """Return a new id of a kind."""
        number = self._counts[kind]
        self._counts[kind] = number + 1
        return f"{kind}-{self._run_id}-{number}"

    def has_issued(self, kind: str, name: str) -> bool:
        """Whether this run handed out an id."""
        head, _, number = name.rpartition("-")
        is_number = number.isascii() and number.isdigit() and str(int(number)) == number
        return head == f"{kind}-{self._run_id}" and is_number and int(number) < self._counts[kind]
