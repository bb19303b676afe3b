"""Looking at rollouts: found by what is wanted, decoded by the run's own tokenizer."""

import json

import pytest
from blake3 import blake3
from rich.console import Console

from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError
from astraflow.core.rollouts import VersionSpan
from astraflow.launch.samples import find_rollouts, show_rollouts
from astraflow.storage.buckets import Bucket
from astraflow.wire.rollout import write_arrays
from astraflow.workflows.tutors import write_tokenizer
from made_up import made_up_trajectory


def _row(reward, *, policy="solver", second=0):
    trajectory = {"policy": policy, "agent": "", "tokens": [1, 4, 3, 3, 4], "sampled_mask": [0] * 3}
    trajectory["sampled_mask"] += [1, 1]
    row = {"prompt": {"prompt": "ba"}, "outcome": "scored", "reward": reward, "reward_parts": {}}
    row["time"] = f"2026-01-01T00:00:{second:02}+00:00"
    return row | {"versions": {policy: 3}, "trajectories": [trajectory]}


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.rollouts.mkdir()
    rows = [_row(reward) for reward in (0.0, 1.0, None, 0.5)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run_dir.rollouts / "solver.jsonl").write_text(text)
    return run_dir


def test_the_newest_that_are_wanted_come_oldest_first(run_dir):
    found = find_rollouts(run_dir, min_reward=0.5, count=10)
    assert [row["reward"] for row in found] == [1.0, 0.5]
    assert len(find_rollouts(run_dir, count=2)) == 2
    assert find_rollouts(run_dir, policy="verifier", count=2) == []


def test_the_newest_of_several_policies_are_those_that_came_last(run_dir):
    rows = [_row(0.25, policy="verifier", second=5), _row(0.75, policy="alice", second=9)]
    for row in rows:
        (name,) = row["versions"]
        (run_dir.rollouts / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    found = find_rollouts(run_dir, count=2)
    assert [row["reward"] for row in found] == [0.25, 0.75]


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(AstraflowError, match="not the folder of a run"):
        find_rollouts(RunDir(tmp_path / "none"), count=1)


def test_tokens_are_shown_as_the_text_of_the_runs_tokenizer(run_dir):
    checkpoint = run_dir.checkpoint("solver", 0)
    checkpoint.mkdir(parents=True)
    write_tokenizer(checkpoint, "ab")
    console = Console(record=True, width=120)
    rows = find_rollouts(run_dir, count=4)
    show_rollouts(console, run_dir, rows, as_json=False)
    assert "solver: <bos>baab" in console.export_text()


def test_machines_get_a_json_object_a_line(run_dir, capsys):
    rows = find_rollouts(run_dir, count=4)
    show_rollouts(Console(), run_dir, rows, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


def test_what_lies_in_the_payload_store_is_shown_while_it_is_there(run_dir, tmp_path):
    pytest.importorskip("fsspec")
    spans = [VersionSpan(version=0, length=3)]
    content = write_arrays(made_up_trajectory("t", "solver", spans, prompt_count=2))
    bucket = Bucket(f"file://{tmp_path}/store")
    bucket.write("a1", content)
    where = {"url": bucket.url, "name": "a1", "nbytes": len(content)}
    row = _row(1.0)
    row["trajectories"] = [
        {"policy": "solver", "agent": "", "payload": where | {"digest": digest.hex()}}
        for digest in (blake3(content).digest(), bytes(32))
    ]
    console = Console(record=True, width=200)
    show_rollouts(console, run_dir, [row], as_json=False)
    text = console.export_text()
    assert "solver: 0 12 3 4" in text
    assert "a1 is not what its digest says)" in text
