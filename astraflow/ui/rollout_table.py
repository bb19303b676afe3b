"""The recorded rollouts of a run as columns, so that a hundred thousand of them fit in memory.

Of each rollout the table has what it is sorted and filtered by, and where its line begins; the
line itself is read when somebody looks at it. Files are read once, and again where they grew.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from math import isfinite, nan
from threading import Lock
from typing import Any, Final, Literal

import numpy as np
from pydantic_core import from_json

from astraflow.config.run_dir import GrowingLines, RunDir
from astraflow.core.errors import AstraflowError, Reason

_NUMBERS: Final = ("time", "reward", "advantage", "step", "row", "tokens", "version", "sample")
_WORDS: Final = {
    "outcome": "outcome",
    "purpose": "purpose",
    "member": "member",
    "group": "group_id",
    "prompt": "prompt_id",
}
"""Columns of words, by which key of a line has them; that of policies is made."""
_MOST_ROWS: Final = 2000
_CHUNK: Final = 1000
_TAIL: Final = b',"trajectories":['


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSearch:
    """Which rollouts are asked for; None: all.

    Attributes:
        words: Of a column of words, the one to have.
        least: Of a column of numbers, the least value.
        most: And the largest.
        text: Somewhere in the ids of rollout, group or prompt.
        sort: Column to sort by.
        descends: Largest first; those without a value always come last.
        offset: Of those, the first one to have.
        limit: And how many, at most.
    """

    words: Mapping[str, str]
    least: Mapping[str, float]
    most: Mapping[str, float]
    text: str = ""
    sort: str = "time"
    descends: bool = True
    offset: int = 0
    limit: int = 200

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "RolloutSearch":
        """Read `member=…`, `reward.min=…`, `text=…`, `sort=-reward`, `offset=…`, `limit=…`.

        Raises:
            AstraflowError: INVALID_FIELD for what is no column or no number.
        """
        sort = query.get("sort") or "-time"
        words = {name: query[name] for name in (*_WORDS, "policy") if query.get(name)}
        bounds: dict[str, dict[str, float]] = {"min": {}, "max": {}}
        for key, value in query.items():
            name, _, bound = key.partition(".")
            if bound in bounds and name in _NUMBERS and value:
                bounds[bound][name] = _number(key, value)
        if sort.lstrip("-") not in (columns := (*_NUMBERS, *_WORDS, "policy")):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"rollouts are not sorted by '{sort}'; give one of {', '.join(columns)}",
            )
        return cls(
            words=words,
            least=bounds["min"],
            most=bounds["max"],
            text=query.get("text", ""),
            sort=sort.lstrip("-"),
            descends=sort.startswith("-"),
            offset=max(0, int(_number("offset", query.get("offset", "0")))),
            limit=max(0, min(_MOST_ROWS, int(_number("limit", query.get("limit", "200"))))),
        )


def _number(key: str, value: str) -> float:
    with suppress(ValueError):
        if isfinite(number := float(value)):
            return number
    raise AstraflowError(Reason.INVALID_FIELD, f"{key}={value} is no number")


class _Column:
    """Numbers of one kind that grow while others read them."""

    def __init__(self, kind: Literal["d", "i"]) -> None:
        self._values: array[float] = array(kind)
        # An array that is being copied cannot grow.
        self._lock = Lock()

    def extend(self, values: Iterable[float]) -> None:
        with self._lock:
            self._values.extend(values)

    def first(self, count: int) -> np.ndarray:
        """Return a copy of the first entries."""
        with self._lock:
            return np.array(self._values)[:count]

    def __getitem__(self, place: int) -> float:
        return self._values[place]

    def __setitem__(self, place: int, value: float) -> None:
        self._values[place] = value


class _WordColumn:
    """A column of words, each kept once."""

    def __init__(self) -> None:
        self.codes = _Column("i")
        self.words: list[str] = []
        self._code_of: dict[str, int] = {}

    def extend(self, words: Sequence[str]) -> None:
        for word in words:
            if word not in self._code_of:
                self._code_of[word] = len(self.words)
                self.words.append(word)
        self.codes.extend([self._code_of[word] for word in words])

    def are(self, word: str, count: int) -> np.ndarray:
        """Return which of the first `count` entries are a word, bool[count]."""
        return self.codes.first(count) == self._code_of.get(word, -1)

    def say(self, text: str, count: int) -> np.ndarray:
        """Return which of the first `count` entries have a text in them, bool[count]."""
        codes = [code for code, word in enumerate(self.words) if text in word]
        return np.isin(self.codes.first(count), codes)

    def ranks(self, places: np.ndarray) -> np.ndarray:
        """Return entries as numbers that are ordered as the words are, f64[n]."""
        ranks = np.argsort(np.argsort(np.array(self.words, dtype=object)))
        return ranks[self.codes.first(places.max(initial=-1) + 1)[places]].astype(float)

    def __getitem__(self, place: int) -> str:
        return self.words[int(self.codes[place])]


class RolloutTable:
    """Columns over all recorded rollouts, in the order of their files.

    Attributes:
        ids: Of the rollouts.
        places: Of a rollout, by its id, in all columns.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._files: list[GrowingLines] = []
        self._numbers = {name: _Column("d") for name in _NUMBERS}
        self._words = {name: _WordColumn() for name in (*_WORDS, "policy")}
        self._where = array("q")
        self._sources = array("i")
        self.ids: list[str] = []
        self.places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def refresh(self) -> None:
        """Read what is new in the files; blocks."""
        known = {each.path for each in self._files}
        paths = sorted(self._run_dir.rollouts.glob("*.jsonl"))
        self._files += [GrowingLines(path) for path in paths if path not in known]
        for source, file in enumerate(self._files):
            lines = file.new()
            while some := list(islice(lines, _CHUNK)):
                self._add(source, [(offset, _head(line)) for offset, line in some])

    @property
    def left_nbytes(self) -> int:
        """What has not been read yet."""
        return sum(file.left_nbytes for file in self._files)

    @property
    def has_shrunk(self) -> bool:
        """Whether files that were read are others by now."""
        return any(file.has_shrunk for file in self._files)

    def _add(self, source: int, found: Sequence[tuple[int, dict[str, Any]]]) -> None:
        rows = [row for _, row in found]
        numbers = {
            "time": [datetime.fromisoformat(row["time"]).timestamp() for row in rows],
            "reward": [nan if row["reward"] is None else row["reward"] for row in rows],
            "tokens": [row["sampled_tokens"] for row in rows],
            "version": [min(row["versions"].values(), default=nan) for row in rows],
            "sample": [row["sample_index"] for row in rows],
        }
        for name, column in self._numbers.items():
            column.extend(numbers.get(name, [nan] * len(rows)))
        for name, key in _WORDS.items():
            self._words[name].extend([row[key] for row in rows])
        self._words["policy"].extend([", ".join(row["versions"]) for row in rows])
        self._where.extend(offset for offset, _ in found)
        self._sources.extend([source] * len(rows))
        ids = [row["rollout_id"] for row in rows]
        self.places.update((each, place) for place, each in enumerate(ids, len(self.ids)))
        # Last: others count these rollouts from now on.
        self.ids += ids

    def train(self, rollout_id: str, *, step: float, row: float, advantage: float | None) -> None:
        """Note that a step trained on a rollout, if it is recorded; nan: none did."""
        place = self.places.get(rollout_id)
        if place is not None:
            self._numbers["step"][place] = step
            self._numbers["row"][place] = row
            self._numbers["advantage"][place] = nan if advantage is None else advantage

    def line(self, rollout_id: str) -> dict[str, Any]:
        """Return a rollout as it was recorded.

        Raises:
            AstraflowError: INVALID_FIELD when it was not.
        """
        place = self.places.get(rollout_id)
        if place is None:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"rollout {rollout_id} is not among the recorded ones"
            )
        return self._files[self._sources[place]].at(self._where[place])

    def of_group(self, group_id: str) -> list[int]:
        """Return the places of a group's recorded rollouts, as they came."""
        return np.flatnonzero(self._words["group"].are(group_id, len(self))).tolist()

    def steps_beside(self, policy: str, step: int) -> list[int | None]:
        """Return the last step before one, and the first after it, with recorded rollouts."""
        count = len(self)
        own = self._words["policy"].say(policy, count)
        steps = self._numbers["step"].first(count)[own]
        before, after = steps[steps < step], steps[steps > step]
        return [
            int(before.max()) if len(before) else None,
            int(after.min()) if len(after) else None,
        ]

    def words(self) -> dict[str, list[str]]:
        """Return what can be chosen in the columns that have few different words."""
        return {n: list(self._words[n].words) for n in ("outcome", "purpose", "member", "policy")}

    def find(self, wanted: RolloutSearch) -> np.ndarray:
        """Return the places of what is wanted, sorted, i64[n]."""
        count = len(self)
        kept = np.ones(count, bool)
        for name, word in wanted.words.items():
            kept &= self._words[name].are(word, count)
        for name, least in wanted.least.items():
            kept &= self._numbers[name].first(count) >= least
        for name, most in wanted.most.items():
            kept &= self._numbers[name].first(count) <= most
        if wanted.text:
            said = np.array([wanted.text in each for each in self.ids[:count]], bool)
            for name in ("group", "prompt"):
                said |= self._words[name].say(wanted.text, count)
            kept &= said
        places = np.flatnonzero(kept)
        if wanted.sort in _NUMBERS:
            keys = self._numbers[wanted.sort].first(count)[places]
        else:
            keys = self._words[wanted.sort].ranks(places)
        return places[np.argsort(-keys if wanted.descends else keys, kind="stable")]

    def rows(self, places: Iterable[int]) -> list[dict[str, Any]]:
        """Return rows of the table as JSON; what is not known is None."""
        return [
            {
                "id": self.ids[place],
                **{name: finite(column[place]) for name, column in self._numbers.items()},
                **{name: column[place] for name, column in self._words.items()},
            }
            for place in places
        ]


def finite(value: float | None) -> float | None:
    """Return a number as JSON has it; None: there is none."""
    return value if value is not None and isfinite(value) else None


def _head(line: bytes) -> dict[str, Any]:
    """Return a recorded rollout without its trajectories, which most of the bytes are.

    No text can be mistaken for where they begin: its quotes are escaped.
    """
    head, mark, _ = line.rpartition(_TAIL)
    row: dict[str, Any] = from_json(head + b"}") if mark else {}
    if "sampled_tokens" not in row:
        # Of an earlier release.
        row = from_json(line)
        row["sampled_tokens"] = sum(each["sampled_count"] for each in row["trajectories"])
    return row
