"""Follows the files of a run, and gives trackers what is new in them.

Trackers never hold up a run: they read what the hub has written, in a thread or a process of
their own, and a tracker that fails is left out. Where each has come to is kept in the run's
folder, so a run that goes on later is not shown twice.
"""

import json
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from math import isfinite
from typing import Any

import structlog
import yaml

from astraflow.config.run_dir import GrowingLines, RunDir, read_json
from astraflow.core.errors import AstraflowError, Reason
from astraflow.dataflow.recorder import write_whole
from astraflow.launch.tracking.trackers import (
    Tracked,
    Tracker,
    make_tracker,
    must_be_tracker,
)


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return what of it are numbers that can be shown."""
    return {k: v for k, v in values.items() if isinstance(v, (int, float)) and isfinite(v)}


def scores_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of evals.jsonl."""
    values: dict[str, Any] = {}
    for result in (*row["results"], row["overall"]):
        place = "/".join(filter(None, ("eval", row["suite"], result["data_set"])))
        values[f"{place}/avg_at_{result['repeats']}"] = result["avg_at_k"]
        values[f"{place}/reward"] = result["mean_reward"]
        values |= {f"{place}/pass_at_{k}": share for k, share in result["pass_at_k"].items()}
    return finite(values)


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_LOOK_S = 2.0

_END_S = 10.0


class RunFollower:
    """Feeds one kind of tracker: one for each policy, made when its first row comes."""

    def __init__(self, run_dir: RunDir, name: str) -> None:
        """Begin where this tracker was left in this run.

        Raises:
            AstraflowError: INVALID_FIELD for a name that is none.
        """
        must_be_tracker(name)
        self._run_dir = run_dir
        self._name = name
        self._folder = run_dir.root / name.replace(":", ".")
        self._place = self._folder / "followed.json"
        offsets = read_json(self._place)
        self._lines = {
            path.stem: GrowingLines(path, offsets.get(path.stem, 0))
            for path in (run_dir.metrics, run_dir.evals)
        }
        self._trackers: dict[str, Tracker] = {}

    def follow(self) -> int:
        """Give on what is new; return the number of rows.

        Raises:
            AstraflowError: What `make_tracker` raises.
        """
        count = 0
        for _, line in self._lines["metrics"].new():
            row = json.loads(line)
            values = finite({name: value for name, value in row.items() if "/" in name})
            self._log(row["policy"], "step", row["step"], row["time"], values)
            count += 1
        for _, line in self._lines["evals"].new():
            row = json.loads(line)
            if row["overall"] is None:
                continue
            for policy, version in row["versions"].items():
                self._log(policy, "version", version, row["time"], scores_of(row))
                count += 1
        if count:
            for tracker in self._trackers.values():
                tracker.flush()
            offsets = {name: lines.offset for name, lines in self._lines.items()}
            write_whole(self._place, json.dumps(offsets))
        return count

    def close(self) -> None:
        for tracker in self._trackers.values():
            tracker.close()

    def _log(self, policy: str, axis: str, at: int, time: str, values: dict[str, float]) -> None:
        if policy not in self._trackers:
            self._folder.mkdir(parents=True, exist_ok=True)
            recipe: dict[str, Any] = yaml.safe_load(self._run_dir.recipe.read_text())
            tracked = Tracked(
                run=self._run_dir.root.name, policy=policy, folder=self._folder, recipe=recipe
            )
            self._trackers[policy] = make_tracker(self._name, tracked)
        self._trackers[policy].log(axis, at, datetime.fromisoformat(time), values)


@contextmanager
def followed(run_dir: RunDir, names: Sequence[str]) -> Generator[None]:
    """Feed trackers from threads while entered, and with the rest at the end.

    One that takes longer than 10 s for that is left behind: `astraflow track` shows the rest.
    """
    over = threading.Event()
    threads = [
        threading.Thread(
            target=_follow, args=(run_dir, name, over), name=f"track-{name}", daemon=True
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        deadline = time.monotonic() + _END_S
        for name, thread in zip(names, threads, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning(
                    "a tracker does not end and is left behind",
                    tracker=name,
                    cure=f"astraflow track {run_dir.root} --to {name}",
                )


def _follow(run_dir: RunDir, name: str, over: threading.Event) -> None:
    """Follow until it is over; a tracker's failure ends its own thread alone."""
    try:
        with closing(RunFollower(run_dir, name)) as follower:
            while not over.wait(_LOOK_S):
                follower.follow()
            follower.follow()
    except AstraflowError as error:
        log.warning("a tracker is left out", tracker=name, why=error.message)
    except Exception:  # whatever a tracker raises, the run goes on
        log.exception("a tracker failed and is left out", tracker=name)


def track_run(run_dir: RunDir, names: Sequence[str], *, is_live: bool) -> Iterator[tuple[str, int]]:
    """Feed trackers with what a run has written; yield how many rows each got.

    Args:
        run_dir: Of a run, live or over.
        names: Of trackers.
        is_live: Go on until interrupted.

    Raises:
        AstraflowError: NOT_READY when there is no run; what `make_tracker` raises.
    """
    if not run_dir.recipe.exists():
        raise AstraflowError(Reason.NOT_READY, f"{run_dir.root} is no folder of a run")
    followers = {name: RunFollower(run_dir, name) for name in names}
    try:
        for name, follower in followers.items():
            yield name, follower.follow()
        with suppress(KeyboardInterrupt):
            while is_live:
                time.sleep(_LOOK_S)
                for follower in followers.values():
                    follower.follow()
    finally:
        for follower in followers.values():
            follower.close()
