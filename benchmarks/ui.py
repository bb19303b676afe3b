"""How fast the page of a large run is there: `ui.py [--rollouts N] [--json FILE]`.

A run of so many recorded rollouts is written by what writes it in a hub, then opened in chromium
(needs it, and playwright). Measured are the first paint and the first curve of a page that was just
served, while the rollouts are still being read, the reading of them all, a sort of the table, and
the frames of a scroll through it. Medians of several openings.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from astraflow.config.run_dir import RunDir
from astraflow.core.batches import BatchGroup, TrainedRow
from astraflow.core.effects import RecordBatch, RecordRollout, RecordVersion
from astraflow.core.errors import Reason
from astraflow.core.rollouts import FinishReason, Outcome, Rollout, Trajectory, VersionSpan
from astraflow.core.status import DropCount, LedgerAccount
from astraflow.core.tasks import Prompt, TaskPurpose
from astraflow.core.versions import VersionReport, VersionState
from astraflow.dataflow.recorder import RunRecorder
from astraflow.launch.summary import summarise

CHROMIUM: Final = Path("/usr/bin/chromium")
GROUP_SIZE: Final = 8
GROUPS_PER_STEP: Final = 25
FAULTY_STEP: Final = 30
_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_NODES: Final = 8


def record_run(folder: Path, *, rollout_count: int) -> RunDir:
    """Write a run as its hub does, every rollout with its tokens; at one step the reward fell."""
    run_dir = RunDir(folder)
    folder.mkdir(parents=True)
    run_dir.recipe.write_text("name: large\nseed: 0\n", encoding="utf-8")
    recorder = RunRecorder(run_dir, keep_one_group_of=1)
    rng = np.random.default_rng(0)
    per_step = GROUP_SIZE * GROUPS_PER_STEP
    for step in range(1, rollout_count // per_step + 1):
        _record_step(recorder, step, rng)
        if step % 20 == 0:
            recorder.flush()
    recorder.status(_status(rollout_count))
    recorder.close()
    summary = summarise(run_dir, name="large", seed=0, state="done", wall_s=1000.0)
    run_dir.summary.write_text(json.dumps(summary.to_json()), encoding="utf-8")
    return run_dir


def _record_step(recorder: RunRecorder, step: int, rng: np.random.Generator) -> None:
    now, rows = _START + timedelta(seconds=2 * step), list[TrainedRow]()
    for group in range(GROUPS_PER_STEP):
        number = (step - 1) * GROUPS_PER_STEP + group
        prompt = Prompt(
            prompt_id=f"train/{number}",
            data_set="train",
            fields={"prompt": f"<img src=x onerror=alert(1)> row {number}"},
        )
        head = BatchGroup(
            group_id=f"group-{number}",
            prompt_id=prompt.prompt_id,
            data_set="train",
            sample_count=GROUP_SIZE,
        )
        made = [_rollout(head, sample, step, rng) for sample in range(GROUP_SIZE)]
        mean = sum(each.reward or 0.0 for each in made) / GROUP_SIZE
        for rollout in made:
            member_id = f"raas-large-{number % _NODES}"
            recorder.record(
                RecordRollout(
                    member_id=member_id, rollout=rollout, prompt=prompt, purpose=TaskPurpose.TRAIN
                ),
                now,
            )
            rows.append(_row(head, rollout, member_id, mean))
    rewards = np.array([row.reward for row in rows])
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "batch/rollouts": float(len(rows)),
        "batch/groups": float(GROUPS_PER_STEP),
        "lag/mean": 1.0,
        "lag/max": 2.0,
        "time/wait_s": 0.4,
        "time/train_s": 1.2,
        "time/wait_batch_frac": 0.25,
        "train/entropy": 1 / step,
        "train/grad_norm": float(rng.random()),
        "perf/tokens_per_s": 1000.0 + step,
        "buffer/dropped/stale": float(step),
    }
    batch = RecordBatch(
        policy_id="solver",
        batch_id=f"batch-{step}",
        step=step,
        version=step - 1,
        metrics=metrics,
        trained_rows=tuple(rows),
    )
    recorder.record(batch, now)
    for node in range(_NODES):
        report = VersionReport(
            policy_id="solver",
            version=step,
            state=VersionState.LIVE,
            pulled_nbytes=100_000,
            pull_duration=timedelta(milliseconds=20 + node),
            pause_duration=timedelta(milliseconds=1),
        )
        effect = RecordVersion(member_id=f"raas-large-{node}", report=report)
        recorder.record(effect, now + timedelta(milliseconds=50 * node))


def _rollout(head: BatchGroup, sample: int, step: int, rng: np.random.Generator) -> Rollout:
    length = int(rng.integers(20, 60))
    old = length // 2
    is_right = rng.random() < (0.05 if step == FAULTY_STEP else min(0.9, 0.5 + step / 500))
    name = f"task-large-{head.group_id}/{sample}"
    trajectory = Trajectory(
        trajectory_id=f"{name}/0",
        policy_id="solver",
        tokens=rng.integers(1, 200, 8 + length, dtype=np.int32),
        sampled_mask=np.arange(8 + length) >= 8,
        logprobs=np.where(np.arange(8 + length) >= 8, -rng.random(8 + length), 0).astype(
            np.float32
        ),
        version_spans=(
            VersionSpan(version=max(0, step - 2), length=old),
            VersionSpan(version=step - 1, length=length - old),
        ),
        finish_reason=FinishReason.STOP,
    )
    return Rollout(
        rollout_id=name,
        task_id=f"task-large-{head.group_id}",
        group_id=head.group_id,
        sample_index=sample,
        outcome=Outcome.SCORED,
        reward=float(is_right),
        reward_parts={"right": float(is_right), "format": 1.0},
        trajectories=(trajectory,),
    )


def _row(head: BatchGroup, rollout: Rollout, member_id: str, mean: float) -> TrainedRow:
    reward = rollout.reward or 0.0
    return TrainedRow(
        head=head,
        rollout_id=rollout.rollout_id,
        trajectory_index=0,
        member_id=member_id,
        reward=reward,
        reward_parts=rollout.reward_parts,
        advantage=reward - mean,
        version_spans=rollout.trajectories[0].version_spans,
    )


def _status(rollout_count: int) -> dict[str, Any]:
    account = LedgerAccount(
        policy_id="solver",
        issued_count=rollout_count + 500,
        in_flight_count=0,
        waiting_count=0,
        fresh_count=0,
        leased_count=0,
        trained_count=rollout_count,
        drops=(DropCount(reason=Reason.STALE, count=500),),
    )
    books = [asdict(account) | {"balanced": account.is_balanced}]
    return {"state": "done", "books": books, "members": []}


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """Serve runs by the command, in a process of its own; give the address."""
    command = [sys.executable, "-m", "astraflow", "ui", *map(str, folders), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield next(word for word in line.split() if word.startswith("http"))
        finally:
            process.terminate()


_SCROLL: Final = """async () => {
  const view = document.querySelector(".vtable");
  const frames = [];
  let last = performance.now();
  for (let at = 0; at < 120; at++) {
    view.scrollTop += 1700;
    await new Promise(requestAnimationFrame);
    frames.push(performance.now() - last);
    last = performance.now();
  }
  return frames;
}"""
_PAINT: Final = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_FETCH: Final = """async (path) => {
  const start = performance.now();
  const found = await (await fetch(path)).json();
  return [performance.now() - start, found.left_nbytes];
}"""


def measure(folder: Path, name: str, *, openings: int) -> dict[str, Any]:
    """Open the page of a run and measure; in ms but for the reading of all rollouts, in s."""
    # Here: who only wants a run of this size needs no browser.
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    paints, curves = list[float](), list[float]()
    with sync_playwright() as player, served(folder) as url:
        served_s = time.perf_counter()
        browser = player.chromium.launch(executable_path=CHROMIUM)
        for _ in range(openings):
            page = browser.new_context(viewport={"width": 1280, "height": 860}).new_page()
            start = time.perf_counter()
            page.goto(url)
            page.wait_for_selector(".uplot canvas")
            curves.append(1000 * (time.perf_counter() - start))
            paints.append(page.evaluate(_PAINT))
        rollouts = f"/api/runs/{name}/rollouts"
        while page.evaluate(_FETCH, rollouts)[1]:
            time.sleep(0.05)
        indexed_s = time.perf_counter() - served_s
        sorts = [page.evaluate(_FETCH, f"{rollouts}?sort=-reward")[0] for _ in range(openings)]
        page.goto(f"{url.split('?')[0]}#/rollouts/{name}")
        page.wait_for_selector(".vrow[data-at]")
        frames = page.evaluate(_SCROLL)
        browser.close()
    return {
        "first_paint_ms": round(median(paints), 1),
        "first_paint_max_ms": round(max(paints), 1),
        "first_curve_ms": round(median(curves), 1),
        "all_rollouts_read_s": round(indexed_s, 2),
        "sort_ms": round(median(sorts), 1),
        "scroll_frame_ms": round(median(frames), 1),
        "scroll_frame_max_ms": round(max(frames), 1),
    }


def main() -> None:
    """Record a run, measure its page, print and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--openings", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = record_run(Path(folder) / "large", rollout_count=options.rollouts)
        nbytes = sum(path.stat().st_size for path in run_dir.root.rglob("*") if path.is_file())
        found = measure(run_dir.root, "large", openings=options.openings)
    told = {"rollouts": options.rollouts, "run_nbytes": nbytes, **found}
    print(json.dumps(told, indent=2))
    if options.json:
        options.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
