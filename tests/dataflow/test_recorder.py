import json
from datetime import UTC, datetime, timedelta
from math import nan

import pytest

from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.core.batches import BatchGroup, TrainedRow
from astraflow.core.effects import EvalChanged, RecordBatch, RecordRollout, RecordVersion
from astraflow.core.errors import Failure, Reason
from astraflow.core.evals import EvalResult, EvalRun, EvalState
from astraflow.core.rollouts import VersionSpan
from astraflow.core.tasks import Prompt, TaskPurpose
from astraflow.core.versions import VersionReport, VersionState
from astraflow.dataflow.recorder import RunRecorder
from made_up import made_up_rollout, made_up_trajectory

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run")


@pytest.fixture
def recorder(run_dir):
    recorder = RunRecorder(run_dir, keep_one_group_of=4)
    yield recorder
    recorder.close()


def trajectory(policy="solver", name="t-1"):
    return made_up_trajectory(name, policy, [VersionSpan(version=3, length=2)])


def rollout(*trajectories):
    return made_up_rollout(*trajectories, group_id="g-2", reward=0.5, reward_parts={"order": 0.5})


def batch(**fields):
    return RecordBatch(policy_id="solver", batch_id="b-1", **fields)


PROMPT = Prompt(prompt_id="p-1", data_set="train", fields={"prompt": "cab"})


def test_a_batch_is_one_line_of_metrics(recorder, run_dir):
    recorder.record(batch(step=7, version=6, metrics={"reward/mean": 0.25}), NOW)
    recorder.flush()
    assert read_json_lines(run_dir.metrics) == [
        {
            "time": NOW.isoformat(),
            "policy": "solver",
            "step": 7,
            "version": 6,
            "reward/mean": 0.25,
        }
    ]


def test_the_rows_of_a_batch_say_where_they_came_from(recorder, run_dir):
    head = BatchGroup(group_id="g-1", prompt_id="p-1", data_set="train", sample_count=2)

    def row(name, reward, advantage):
        return TrainedRow(
            head=head,
            rollout_id=name,
            trajectory_index=0,
            member_id="m-1",
            reward=reward,
            reward_parts={"order": reward},
            advantage=advantage,
            version_spans=(VersionSpan(version=3, length=2),),
        )

    rows = (row("r-1", 0.5, 0.25), row("r-2", nan, 0.0))
    recorder.record(batch(step=7, version=6, metrics={}, trained_rows=rows), NOW)
    recorder.flush()
    (line,) = read_json_lines(run_dir.batches)
    prompt = {"group_id": "g-1", "data_set": "train", "prompt_id": "p-1", "epoch": 0}
    assert (line["step"], line["batch_id"], line["groups"]) == (7, "b-1", [prompt])
    assert line["members"] == ["m-1"]
    assert line["rows"] == {
        "group": [0, 0],
        "rollout_id": ["r-1", "r-2"],
        "trajectory": [0, 0],
        "member": [0, 0],
        "reward": [0.5, None],
        "advantage": [0.25, 0.0],
        "version_spans": [[[3, 2]], [[3, 2]]],
    }
    assert line["reward_parts"] == {"order": [0.5, None]}


def test_a_version_that_failed_says_why(recorder, run_dir):
    failure = Failure(reason=Reason.DIGEST_MISMATCH, message="chunk 3")
    report = VersionReport(
        policy_id="solver", version=4, state=VersionState.FAILED, failure=failure, base_version=3
    )
    recorder.record(RecordVersion(member_id="m-1", report=report), NOW)
    live = VersionReport(
        policy_id="solver",
        version=4,
        state=VersionState.LIVE,
        pulled_nbytes=12,
        pull_duration=timedelta(seconds=1.5),
        pause_duration=timedelta(milliseconds=2),
    )
    recorder.record(RecordVersion(member_id="m-1", report=live), NOW)
    recorder.flush()
    failed, fine = read_json_lines(run_dir.versions)
    assert (failed["state"], failed["reason"], failed["base_version"]) == (
        "failed",
        "DIGEST_MISMATCH",
        3,
    )
    assert (fine["pulled_nbytes"], fine["pull_s"], fine["pause_s"]) == (12, 1.5, 0.002)


def test_a_rollout_lies_with_its_policy_or_with_all(recorder, run_dir):
    kinds = {"purpose": TaskPurpose.TRAIN, "prompt": PROMPT, "member_id": "m-1"}
    recorder.record(RecordRollout(rollout=rollout(trajectory()), **kinds), NOW)
    both = rollout(trajectory(), trajectory("verifier", "t-2"))
    recorder.record(RecordRollout(rollout=both, **kinds), NOW)
    recorder.flush()
    (row,) = read_json_lines(run_dir.rollouts / "solver.jsonl")
    assert row["prompt"] == {"prompt": "cab"}
    assert row["trajectories"][0]["tokens"] == [0, 1, 2]
    assert row["trajectories"][0]["version_spans"] == [[3, 2]]
    assert row["trajectories"][0]["logprobs"] == [-0.5, -0.5]
    assert (row["reward"], row["reward_parts"], row["outcome"]) == (0.5, {"order": 0.5}, "scored")
    (pair,) = read_json_lines(run_dir.rollouts / "all.jsonl")
    assert [t["policy"] for t in pair["trajectories"]] == ["solver", "verifier"]


def test_one_group_of_so_many_is_kept_in_every_run(recorder):
    groups = [f"g-{number}" for number in range(4000)]
    kept = [group for group in groups if recorder.keeps(group)]
    assert 800 < len(kept) < 1200
    assert kept == [group for group in groups if recorder.keeps(group)]


def test_an_evaluation_is_one_line(recorder, run_dir):
    result = EvalResult(
        data_set="held_out",
        prompt_count=2,
        repeats=4,
        avg_at_k=0.5,
        pass_at_k={1: 0.5, 4: 1.0},
        mean_reward=0.5,
    )
    run = EvalRun(
        eval_run_id="e-1",
        suite="held_out",
        versions={"solver": 0},
        state=EvalState.SUCCEEDED,
        rollout_count=8,
        results=(result,),
        overall=result,
        create_time=NOW,
        finish_time=NOW,
    )
    recorder.record(EvalChanged(eval_run=run), NOW)
    recorder.flush()
    (row,) = read_json_lines(run_dir.evals)
    assert row["overall"]["pass_at_k"] == {"1": 0.5, "4": 1.0}
    assert (row["suite"], row["state"], row["versions"]) == ("held_out", "succeeded", {"solver": 0})


def test_the_status_is_replaced_whole(recorder, run_dir):
    recorder.status({"state": "running"})
    recorder.status({"state": "done", "start_time": NOW})
    assert json.loads(run_dir.status.read_text()) == {"state": "done", "start_time": str(NOW)}
    assert [path.name for path in run_dir.root.iterdir()] == ["status.json"]
