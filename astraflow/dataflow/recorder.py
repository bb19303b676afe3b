"""The recorder: what the hub leaves in the run's folder for people and plots.

Rows are built and written on the writer's thread; the event loop only hands over frozen
records.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np

from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.core.batches import TrainedRow
from astraflow.core.effects import (
    Effect,
    EvalChanged,
    RecordBatch,
    RecordRollout,
    RecordVersion,
    RunSaved,
)
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.evals import EvalRun
from astraflow.core.ids import GroupId
from astraflow.core.rollouts import Trajectory, VersionSpan
from astraflow.core.status import SavedRun
from astraflow.storage.lines import LineWriter

Line: TypeAlias = RecordBatch | EvalChanged | RunSaved


class RunRecorder:
    """Writes metrics, versions, evaluations and sampled rollouts as JSON lines."""

    def __init__(
        self, run_dir: RunDir, *, keep_one_group_of: int = 16, payload_url: str = ""
    ) -> None:
        """Record into a folder.

        Args:
            run_dir: Made when the first line is written.
            keep_one_group_of: Of so many groups, the rollouts of one are written.
            payload_url: Of the run's payload store; empty: it has none.
        """
        self._payload_url = payload_url
        self._run_dir = run_dir
        self._keep_one_of = max(1, keep_one_group_of)
        self._lines = LineWriter()

    def record(self, effect: Effect, now: datetime) -> None:
        """Write what an effect tells people, if anything: one line, or the file of a checkpoint."""
        lines, run_dir = self._lines, self._run_dir
        match effect:
            case RecordRollout():
                if self.keeps(effect.rollout.group_id):
                    policies = {each.policy_id for each in effect.rollout.trajectories}
                    name = policies.pop() if len(policies) == 1 else "all"
                    make = partial(_rollout_row, now, effect, payload_url=self._payload_url)
                    lines.write_later(run_dir.rollouts / f"{name}.jsonl", make)
            case RecordBatch(policy_id=policy_id, step=step, version=version):
                head: dict[str, Any] = {"time": now.isoformat(), "policy": policy_id}
                head |= {"step": step, "version": version}
                lines.write(run_dir.metrics, head | dict(effect.metrics))
                if effect.trained_rows:
                    head["batch_id"] = effect.batch_id
                    make = partial(_trained_rows, head, effect.trained_rows)
                    lines.write_later(run_dir.batches, make)
            case RecordVersion():
                lines.write_later(run_dir.versions, partial(_version_row, now, effect))
            case EvalChanged():
                if effect.eval_run.state.is_final:
                    lines.write_later(run_dir.evals, partial(_eval_row, now, effect.eval_run))
            case RunSaved():
                self._save(effect.saved)
            case _:
                pass

    def keeps(self, group_id: GroupId) -> bool:
        """Whether the rollouts of a group are written; the same in every run."""
        return crc32(group_id.encode()) % self._keep_one_of == 0

    def saved_path(self, checkpoint_id: str) -> Path:
        """Return the file that says what a checkpoint of the run is made of."""
        return self._run_dir.saved(checkpoint_id)

    def status(self, status: Mapping[str, Any]) -> None:
        """Write what the hub knew at the end, whole or not at all.

        Raises:
            AstraflowError: JOURNAL_FAILED when it cannot be written.
        """
        text = json.dumps(status, default=str, indent=2) + "\n"
        with self._writing():
            write_whole(self._run_dir.status, text)

    def make_up(self, lines: Sequence[tuple[Line, datetime]]) -> None:
        """Write the batches, evaluations and checkpoints of a journal missing here; blocks."""
        metrics = {
            (row["policy"], row["step"], row["version"])
            for row in read_json_lines(self._run_dir.metrics)
        }
        evals = {row["eval_run_id"] for row in read_json_lines(self._run_dir.evals)}
        for line, time in lines:
            match line:
                case RecordBatch():
                    is_there = (line.policy_id, line.step, line.version) in metrics
                case EvalChanged():
                    is_there = line.eval_run.eval_run_id in evals
                case RunSaved():
                    is_there = False
            if not is_there:
                self.record(line, time)

    def flush(self) -> None:
        """Wait until all lines are in their files; blocks, so call it off the loop.

        Raises:
            AstraflowError: JOURNAL_FAILED when some cannot be written.
        """
        with self._writing():
            self._lines.flush()

    def close(self) -> None:
        """Write what is left; blocks, so call it off the loop.

        Raises:
            AstraflowError: JOURNAL_FAILED when something could not be written.
        """
        with self._writing():
            self._lines.close()

    def _save(self, saved: SavedRun) -> None:
        """Write what a checkpoint of the run is made of, unless it is there."""
        path = self.saved_path(saved.checkpoint_id)
        if not path.exists():
            row = asdict(saved) | {"save_time": saved.save_time.isoformat()}
            with self._writing():
                write_whole(path, json.dumps(row, indent=2) + "\n")

    @contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise AstraflowError(
                Reason.JOURNAL_FAILED,
                f"what the hub tells people in {self._run_dir.root} cannot be written ({error}); "
                "make room or make it writable: a hub that is started again with the same folder "
                "writes the steps and evaluations that are missing",
            ) from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that a reader sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _why(failure: Failure | None) -> dict[str, Any]:
    return {} if failure is None else {"reason": failure.reason, "message": failure.message}


def _version_row(now: datetime, effect: RecordVersion) -> dict[str, Any]:
    report = effect.report
    row: dict[str, Any] = {
        "time": now.isoformat(),
        "policy": report.policy_id,
        "version": report.version,
        "member": effect.member_id,
        "state": report.state,
        "base_version": report.base_version,
        "pulled_nbytes": report.pulled_nbytes,
        "sources": [each.address for each in report.reports if each.nbytes],
    }
    for name in ("pull", "verify", "decode", "stage", "pause"):
        span: timedelta | None = getattr(report, f"{name}_duration")
        row[f"{name}_s"] = None if span is None else span.total_seconds()
    return row | _why(report.failure)


def _trained_rows(head: Mapping[str, Any], rows: Sequence[TrainedRow]) -> dict[str, Any]:
    """Return rows column by column; groups and members once, by their place in a list."""
    groups = {row.head.group_id: row.head for row in rows}
    places = {group_id: place for place, group_id in enumerate(groups)}
    members = {member_id: n for n, member_id in enumerate(dict.fromkeys(r.member_id for r in rows))}
    parts = dict.fromkeys(name for row in rows for name in row.reward_parts)
    return {
        **head,
        "groups": [
            {
                "group_id": group.group_id,
                "data_set": group.data_set,
                "prompt_id": group.prompt_id,
                "epoch": group.epoch,
            }
            for group in groups.values()
        ],
        "members": list(members),
        "rows": {
            "group": [places[row.head.group_id] for row in rows],
            "rollout_id": [row.rollout_id for row in rows],
            "trajectory": [row.trajectory_index for row in rows],
            "member": [members[row.member_id] for row in rows],
            "reward": _rounded([row.reward for row in rows]),
            "advantage": _rounded([row.advantage for row in rows]),
            "version_spans": _spans([row.version_spans for row in rows]),
        },
        "reward_parts": {
            name: _rounded([row.reward_parts.get(name, nan) for row in rows]) for name in parts
        },
    }


def _rounded(values: Sequence[float]) -> list[float | None]:
    """Return numbers in six digits; None: there is none."""
    return [float(f"{value:.6g}") if isfinite(value) else None for value in values]


def _spans(rows: Sequence[Sequence[VersionSpan]]) -> list[list[list[int]]]:
    return [[[span.version, span.length] for span in spans] for spans in rows]


def _rollout_row(now: datetime, effect: RecordRollout, *, payload_url: str) -> dict[str, Any]:
    rollout, prompt = effect.rollout, effect.prompt
    row: dict[str, Any] = {
        "time": now.isoformat(),
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "sample_index": rollout.sample_index,
        "purpose": effect.purpose,
        "member": effect.member_id,
        "data_set": prompt.data_set,
        "prompt_id": prompt.prompt_id,
        "epoch": prompt.epoch,
        "prompt": dict(prompt.fields),
        "outcome": rollout.outcome,
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        "metrics": dict(rollout.metrics),
        "versions": dict(rollout.policy_versions),
        "start_time": None if rollout.start_time is None else rollout.start_time.isoformat(),
        "finish_time": None if rollout.finish_time is None else rollout.finish_time.isoformat(),
        "sampled_tokens": sum(each.sampled_count for each in rollout.trajectories),
    }
    if rollout.failure is not None:
        row |= {**_why(rollout.failure), "cause": rollout.failure.cause}
    # Last: who looks through many lines leaves out the end of each.
    return row | {
        "trajectories": [_trajectory_row(each, payload_url) for each in rollout.trajectories]
    }


def _trajectory_row(trajectory: Trajectory, payload_url: str) -> dict[str, Any]:
    """Return what people see of a trajectory; of one in the payload store where it is."""
    payload = trajectory.payload
    if payload is None:
        arrays = {
            "tokens": trajectory.tokens.tolist(),
            "sampled_mask": trajectory.sampled_mask.astype(int).tolist(),
            # Of the sampled tokens alone: those of the others are 0.
            "logprobs": trajectory.logprobs[trajectory.sampled_mask]
            .astype(np.float64)
            .round(4)
            .tolist(),
        }
    else:
        where = {"url": payload_url, "name": payload.name, "digest": payload.digest.hex()}
        arrays = {"payload": where | {"nbytes": payload.nbytes}}
    return {
        "policy": trajectory.policy_id,
        "agent": trajectory.agent,
        "finish_reason": trajectory.finish_reason,
        "reward": trajectory.reward,
        "sampled_count": trajectory.sampled_count,
        **arrays,
        "version_spans": _spans([trajectory.version_spans])[0],
    }


def _eval_row(now: datetime, run: EvalRun) -> dict[str, Any]:
    row = {"time": now.isoformat(), **asdict(replace(run, failure=None))}
    del row["failure"]
    row["create_time"] = run.create_time.isoformat()
    row["finish_time"] = None if run.finish_time is None else run.finish_time.isoformat()
    return row | _why(run.failure)
