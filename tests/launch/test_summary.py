"""The summary is read back from the run's own files."""

import json

from rich.console import Console

from astraflow.config.run_dir import RunDir
from astraflow.launch.summary import draw_reward, show_summary, summarise

CAUSE = {"cause": "KeyError at a.py:7", "count": 312, "reason": "SCORER_FAILED", "message": "[odd]"}
FAILURES = {"finished_count": 1000, "failed_count": 312, "failed_share": 0.312, "causes": [CAUSE]}


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _eval(version, accuracy, **more):
    row = {"suite": "held_out", "state": "succeeded", "versions": {"solver": version}}
    return row | {"overall": {"avg_at_k": accuracy, "mean_reward": accuracy}} | more


def _live(version, base, nbytes, **more):
    row = {"policy": "solver", "version": version, "base_version": base, "state": "live"}
    return row | {"pulled_nbytes": nbytes, "pause_s": 0.002} | more


def test_summary_adds_up_what_the_hub_recorded(tmp_path):
    run_dir = RunDir(tmp_path)
    steps = [
        {"policy": "solver", "step": n, "reward/mean": n / 10, "batch/rollouts": 8}
        | {"lag/max": n % 3, "data/replay/rollouts": n // 10 * 3}
        | {"batch/sampled_tokens": 40, "time/wait_batch_frac": 0.5}
        | {"time/wait_s": 1.5, "time/train_s": 0.5}
        for n in range(1, 11)
    ]
    _write(run_dir.metrics, steps)
    failed = _live(2, 1, 50, state="failed")
    _write(run_dir.versions, [_live(0, None, 1000), _live(1, 0, 100), failed])
    _write(run_dir.evals, [_eval(10, 0.9), _eval(0, 0.3), _eval(5, 0.6, state="failed")])
    run_dir.status.write_text(json.dumps({"failures": FAILURES}))
    summary = summarise(run_dir, name="sort", seed=1, state="done", wall_s=60.0)
    written = json.loads(json.dumps(summary.to_json()))
    assert (written["accuracy_before"], written["accuracy_after"]) == (0.3, 0.9)
    assert (written["steps"], written["rollouts"], written["versions"]) == (10, 77, 2)
    assert written["failures"] == FAILURES
    assert written["weights_nbytes"] == {"solver": 1100}
    assert written["tokens_per_s"] == 20.0
    solver = written["policies"]["solver"]
    assert (solver["reward_first"], solver["reward_last"]) == (0.1, 1.0)
    assert (solver["staleness_max"], solver["patch_share"], solver["pause_ms"]) == (2, 0.5, 2.0)


def test_the_table_at_the_end_says_what_failed(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.status.write_text(json.dumps({"failures": FAILURES}))
    summary = summarise(run_dir, name="sort", seed=1, state="failed", wall_s=1.0)
    console = Console(width=160)
    with console.capture() as shown:
        show_summary(console, summary, run_dir)
    for words in ("312 of 1,000 (31.2%)", "312 times", "KeyError at a.py:7", "[odd]"):
        assert words in shown.get()


def headline(run_dir):
    summary = summarise(run_dir, name="sort", seed=1, state="done", wall_s=1.0)
    console = Console(width=300)
    with console.capture() as shown:
        show_summary(console, summary, run_dir)
    return shown.get().strip().splitlines()[0]


def test_what_was_not_measured_is_not_told_as_a_figure(tmp_path):
    run_dir = RunDir(tmp_path)
    _write(run_dir.evals, [_eval(0, 0.036)])
    assert "held-out accuracy 0.036 at the start, not measured later" in headline(run_dir)
    _write(run_dir.evals, [_eval(9, 0.5)])
    assert "held-out accuracy 0.500 at the end, not measured before" in headline(run_dir)
    _write(run_dir.evals, [_eval(0, 0.036), _eval(9, 0.5)])
    assert "held-out accuracy 0.036 → 0.500 (+0.464), 1 s" in headline(run_dir)


def test_rewards_that_are_not_between_0_and_1_are_told_and_drawn(tmp_path):
    run_dir = RunDir(tmp_path)
    rewards = [{"policy": "solver", "step": n, "reward/mean": -9.0 + n} for n in range(1, 11)]
    _write(run_dir.metrics, rewards)
    evals = [_eval(version, 0.0) for version in (0, 9)]
    for row, reward in zip(evals, (-8.5, 0.92), strict=True):
        row["overall"]["mean_reward"] = reward
    _write(run_dir.evals, evals)
    assert headline(run_dir) == (
        "sort: held-out reward -8.500 → 0.920 (+9.420), reward -8.000 → 1.000 (+9.000) in training,"
        " 1 s in all, 0 s of training, 0 tokens/s"
    )
    assert draw_reward(run_dir) == run_dir.plot


def test_steps_that_were_lost_with_a_trainer_count_once(tmp_path):
    run_dir = RunDir(tmp_path)
    steps = [
        {"policy": "solver", "step": step, "reward/mean": reward, "batch/rollouts": 8}
        for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.6), (3, 0.7))
    ]
    _write(run_dir.metrics, steps)
    summary = summarise(run_dir, name="sort", seed=1, state="done", wall_s=1.0)
    solver = summary.policies["solver"]
    assert (solver.steps, solver.rollouts) == (3, 24)
    assert (solver.reward_first, solver.reward_last) == (0.1, 0.7)
    drawn = draw_reward(run_dir).read_bytes()
    _write(run_dir.metrics, [steps[0], *steps[3:]])
    assert draw_reward(run_dir).read_bytes() == drawn


def test_stored_pairs_are_told_apart_and_their_constant_reward_is_no_headline(tmp_path):
    run_dir = RunDir(tmp_path)
    steps = [
        {"policy": "judge", "step": step, "reward/mean": 0.5, "pairs/accuracy": share}
        for step, share in enumerate((0.25, 0.5, 1.0), 1)
    ]
    _write(run_dir.metrics, steps)
    summary = summarise(run_dir, name="judge", seed=0, state="done", wall_s=1.0)
    console = Console(width=160)
    with console.capture() as shown:
        show_summary(console, summary, run_dir)
    headline = shown.get().strip().splitlines()[0]
    assert "pairs told apart 0.250 → 1.000" in headline
    assert "reward" not in headline


def test_a_run_that_wrote_nothing_has_a_summary_that_says_why(tmp_path):
    summary = summarise(
        RunDir(tmp_path), name="sort", seed=0, state="failed", wall_s=1.0, failure="no port"
    )
    assert summary.accuracy_before is None
    assert summary.to_json()["failure"] == "no port"
