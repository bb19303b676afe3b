"""One run as the page shows it: what its folder says, and its hub while it is live.

Whatever is asked for is answered from columns and offsets in memory; files are read once, and
again where they grew.
"""

import asyncio
import json
from collections.abc import Mapping
from math import nan, sqrt
from threading import Lock
from typing import Any

import structlog
from pydantic_core import from_json

from astraflow.client.control import ControlClient
from astraflow.config.run_dir import GrowingLines, RunDir, read_json_lines
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.run_folder import is_live
from astraflow.launch.runs import row_of
from astraflow.launch.samples import RunTokenizers, whole_trajectory
from astraflow.launch.status import live_status
from astraflow.launch.summary import Row, keep_step
from astraflow.ui.rollout_table import RolloutSearch, RolloutTable, finite

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Json = dict[str, Any]

_HEAD = frozenset({"time", "policy", "step", "version"})
_SILENT = "the hub of a live run does not answer"
_VERSION_NAMES = (
    *("time", "policy", "version", "member", "state"),
    *("pulled_nbytes", "pull_s", "pause_s"),
)


class ShownRun:
    """A run of which the page shows everything.

    Attributes:
        key: Its name on the page; no other run has it.
        rollouts: Its recorded rollouts.
    """

    def __init__(self, key: str, run_dir: RunDir) -> None:
        self.key = key
        self.run_dir = run_dir
        self.rollouts = RolloutTable(run_dir)
        self._tokenizers = RunTokenizers(run_dir)
        self._steps: dict[str, list[Row]] = {}
        self._step_lines = GrowingLines(run_dir.metrics)
        self._versions: dict[str, list[Any]] = {name: [] for name in _VERSION_NAMES}
        self._version_lines = GrowingLines(run_dir.versions)
        self._batch_lines = GrowingLines(run_dir.batches)
        # Where the line of a step begins: of each policy by step, in their order.
        self._batches: dict[str, dict[int, int]] = {}
        # By recorded rollout: the steps that trained on it, each as policy and step.
        self._trained: dict[str, tuple[tuple[str, int], ...]] = {}
        self._reading, self._indexing = Lock(), Lock()
        self._summary: tuple[object, Json] = (None, {})

    def is_replaced(self) -> bool:
        """Return whether its folder is that of another run by now, of the same name."""
        lines = (self._step_lines, self._version_lines, self._batch_lines, self.rollouts)
        return any(each.has_shrunk for each in lines)

    def head(self) -> Json:
        """Return what stands in the list of runs."""
        steps = self._read_steps()
        metrics = {name for rows in steps.values() for row in rows[-1:] for name in row}
        return {
            "key": self.key,
            **self._summarised(),
            "is_live": is_live(self.run_dir),
            "policies": list(steps),
            "last_steps": {policy: rows[-1]["step"] for policy, rows in steps.items()},
            "metrics": sorted(metrics - _HEAD),
        }

    def _summarised(self) -> Json:
        """Return what came of the run so far, read again where its folder changed."""
        run_dir = self.run_dir
        paths = (run_dir.metrics, run_dir.versions, run_dir.evals, run_dir.status, run_dir.summary)
        sizes = [path.stat().st_size for path in paths if path.exists()]
        changed = run_dir.root.stat().st_mtime_ns if run_dir.root.exists() else 0
        seen = (is_live(run_dir), changed, sizes)
        if self._summary[0] != seen:
            self._summary = (seen, row_of(run_dir))
        return self._summary[1]

    def evals(self) -> list[Json]:
        """Return every evaluation that was finished."""
        return read_json_lines(self.run_dir.evals)

    def curves(self, metric: str) -> Json:
        """Return one metric over the steps of every policy.

        A mean over rollouts has an error: 1.96 standard errors, which it is within with 95 %.
        """
        deviation = metric.removesuffix("mean") + "std" if metric.endswith("/mean") else ""
        return {
            policy: {
                "step": [row["step"] for row in rows],
                "version": [row["version"] for row in rows],
                "time": [row["time"] for row in rows],
                "value": [finite(row.get(metric)) for row in rows],
                "error": [_error(row, deviation) for row in rows]
                if any(deviation in row for row in rows[-1:])
                else None,
            }
            for policy, rows in self._read_steps().items()
        }

    def step(self, policy: str, step: int) -> Json:
        """Return what a step was trained on: every row, its group, node, versions, advantage.

        Raises:
            AstraflowError: INVALID_FIELD when there is no such step.
        """
        rows = {row["step"]: row for row in self._read_steps().get(policy, ())}
        if step not in rows:
            raise AstraflowError(Reason.INVALID_FIELD, f"{policy} has no step {step} in this run")
        self.index()
        known = sorted(rows)
        place = known.index(step)
        found: Json = {
            "policy": policy,
            "step": step,
            "before": known[place - 1] if place else None,
            "after": known[place + 1] if place + 1 < len(known) else None,
            "metrics": rows[step],
            "recorded": self.rollouts.steps_beside(policy, step),
            "batch": None,
        }
        offset = self._batches.get(policy, {}).get(step)
        if offset is not None:
            batch = self._batch_lines.at(offset)
            ids = batch["rows"]["rollout_id"]
            batch["rows"]["is_recorded"] = [each in self.rollouts.places for each in ids]
            found["batch"] = batch
        return found

    def find_rollouts(self, query: Mapping[str, str]) -> Json:
        """Return a page of the recorded rollouts, and how many there are like that."""
        search = RolloutSearch.parse(query)
        places = self.rollouts.find(search)
        page = places[search.offset : search.offset + search.limit]
        return {
            "total": len(self.rollouts),
            "found": len(places),
            "left_nbytes": self.rollouts.left_nbytes,
            "words": self.rollouts.words(),
            "offset": search.offset,
            "rows": self.rollouts.rows(page.tolist()),
        }

    def rollout(self, rollout_id: str) -> Json:
        """Return one recorded rollout with the text of its tokens, and the others of its group.

        Raises:
            AstraflowError: INVALID_FIELD when it is not recorded.
        """
        self.index()
        line = self.rollouts.line(rollout_id)
        trajectories = [dict(whole_trajectory(each)) for each in line["trajectories"]]
        for each in trajectories:
            if "tokens" in each:
                each["pieces"] = self._tokenizers.pieces(each["policy"], each["tokens"])
        places = self.rollouts.of_group(line["group_id"])
        return {
            **line,
            "trajectories": trajectories,
            "trained": self._trained_rows(rollout_id),
            "place": self.rollouts.rows([self.rollouts.places[rollout_id]])[0],
            "group": self.rollouts.rows(places),
        }

    def timeline(self) -> Json:
        """Return what each trainer did when, and when each version went live on each node."""
        with self._reading:
            for _, line in self._version_lines.new():
                row = from_json(line)
                for name, column in self._versions.items():
                    column.append(row.get(name))
            versions = {name: column.copy() for name, column in self._versions.items()}
        steps = {
            policy: {
                "step": [row["step"] for row in rows],
                "time": [row["time"] for row in rows],
                "wait_s": [row.get("time/wait_s") for row in rows],
                "train_s": [row.get("time/train_s") for row in rows],
            }
            for policy, rows in self._read_steps().items()
        }
        return {"trainers": steps, "versions": versions}

    async def status(self) -> Json:
        """Return what the hub knows, of a live run, or knew at the end; empty: it told nobody."""
        if is_live(self.run_dir):
            try:
                return from_json(await live_status(self.run_dir))
            except AstraflowError as error:
                log.warning(_SILENT, run=self.key, why=str(error))
        if not self.run_dir.status.exists():
            return {}
        return json.loads(await asyncio.to_thread(self.run_dir.status.read_text))

    async def cut(self) -> None:
        """Forget the steps that the hub of a live run counts as not trained.

        A trainer that came back at an older step does them again, and only then do the files
        say so.
        """
        if not is_live(self.run_dir):
            return
        # Before the hub is asked: what is written by now and it does not count was undone.
        last = {policy: rows[-1] for policy, rows in self._read_steps().items()}
        written_nbytes = self._batch_lines.offset
        try:
            async with ControlClient.of(self.run_dir) as control:
                policies = (await control.get_run()).policies
        except AstraflowError as error:
            log.warning(_SILENT, run=self.key, why=str(error))
            return
        for each in policies:
            newest = last.get(each.policy_id)
            await asyncio.to_thread(self._cut, each.policy_id, each.step, newest, written_nbytes)

    def _cut(self, policy: str, step: int, newest: Row | None, written_nbytes: int) -> None:
        with self._reading:
            rows = self._steps.get(policy, [])
            # If another came meanwhile, the next look knows better.
            if rows and rows[-1] is newest:
                self._steps[policy] = [row for row in rows if row["step"] <= step]
        with self._indexing:
            self._undo(policy, step, written_nbytes)

    def index(self) -> None:
        """Read what is new of the recorded rollouts and of what was trained on; blocks."""
        with self._indexing:
            # First: what they were made of was written before them.
            batches = list(self._batch_lines.new())
            self.rollouts.refresh()
            for offset, line in batches:
                self._note_batch(offset, from_json(line))

    def _note_batch(self, offset: int, batch: Json) -> None:
        policy, step, rows = batch["policy"], batch["step"], batch["rows"]
        self._undo(policy, step - 1, offset)
        self._batches.setdefault(policy, {})[step] = offset
        mark = (policy, step)
        for row, rollout_id in enumerate(rows["rollout_id"]):
            advantage = rows["advantage"][row]
            self.rollouts.train(rollout_id, step=step, row=row, advantage=advantage)
        for rollout_id in filter(
            self.rollouts.places.__contains__, dict.fromkeys(rows["rollout_id"])
        ):
            self._trained[rollout_id] = (*self._trained.get(rollout_id, ()), mark)

    def _undo(self, policy: str, last: int, end: int) -> None:
        """Forget the steps after one, as far as they were written before a place of the file."""
        steps = self._batches.get(policy, {})
        while steps and (step := next(reversed(steps))) > last and steps[step] < end:
            rows = self._batch_lines.at(steps.pop(step))["rows"]
            for each in self._trained.keys() & set(rows["rollout_id"]):
                kept = tuple(mark for mark in self._trained[each] if mark != (policy, step))
                self._trained[each] = kept
                self.rollouts.train(each, step=nan, row=nan, advantage=None)
                for row in self._trained_rows(each)[-1:]:
                    keys = ("step", "row", "advantage")
                    self.rollouts.train(each, **{key: row[key] for key in keys})

    def _trained_rows(self, rollout_id: str) -> list[Json]:
        """Return in which rows of which steps a rollout was trained on, step by step."""
        found: list[Json] = []
        for policy, step in self._trained.get(rollout_id, ()):
            rows = self._batch_lines.at(self._batches[policy][step])["rows"]
            found += [
                {
                    "policy": policy,
                    "step": step,
                    "row": row,
                    "trajectory": rows["trajectory"][row],
                    "advantage": rows["advantage"][row],
                }
                for row, each in enumerate(rows["rollout_id"])
                if each == rollout_id
            ]
        return found

    def _read_steps(self) -> dict[str, list[Row]]:
        with self._reading:
            for _, line in self._step_lines.new():
                row = from_json(line)
                keep_step(self._steps.setdefault(row["policy"], []), row)
            return {policy: rows for policy, rows in self._steps.items() if rows}


def _error(row: Row, deviation: str) -> float | None:
    """Return how far the mean over the rollouts of a step may be off, with 95 %."""
    found = finite(row.get(deviation))
    return None if found is None else 1.96 * found / sqrt(max(1.0, row.get("batch/rollouts", 1.0)))
