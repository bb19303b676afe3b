"""The rows of a run's files, as trackers take them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRow:
    """Numbers of one policy.

    Attributes:
        policy: Whose.
        axis: step or version.
        at: Which.
        time: When.
        values: Finite ones.
    """

    policy: str
    axis: str
    at: int
    time: datetime
    values: Mapping[str, float]


class LineTail:
    """Reads a growing file of JSON lines from where it was left."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """Begin at an offset in bytes; the file may be still to come."""
        self._path = path
        self.offset = offset

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of whole lines that have come since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                yield json.loads(line)


def metric_row(row: Mapping[str, Any]) -> TrackedRow:
    """Return a row of metrics.jsonl."""
    values = {name: value for name, value in row.items() if "/" in name and _is_number(value)}
    return TrackedRow(
        policy=row["policy"],
        axis="step",
        at=row["step"],
        time=datetime.fromisoformat(row["time"]),
        values=values,
    )


def eval_rows(row: Mapping[str, Any]) -> Iterator[TrackedRow]:
    """Yield a row of evals.jsonl, for each policy that was evaluated."""
    if row["overall"] is None:
        return
    values: dict[str, float] = {}
    for result in (*row["results"], row["overall"]):
        place = "/".join(filter(None, ("eval", row["suite"], result["data_set"])))
        values |= _scores(place, result)
    for policy, version in row["versions"].items():
        yield TrackedRow(
            policy=policy,
            axis="version",
            at=version,
            time=datetime.fromisoformat(row["time"]),
            values=values,
        )


def _scores(place: str, result: Mapping[str, Any]) -> dict[str, float]:
    found = {
        f"{place}/avg_at_{result['repeats']}": result["avg_at_k"],
        f"{place}/reward": result["mean_reward"],
        **{f"{place}/pass_at_{k}": share for k, share in result["pass_at_k"].items()},
    }
    return {name: value for name, value in found.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and isfinite(value)
