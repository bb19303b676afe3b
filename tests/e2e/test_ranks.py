"""A trainer of two ranks, weights and rollouts by way of stores; a rank is killed: all go on."""

import signal

import psutil
import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import started

pytestmark = pytest.mark.e2e


def kill_rank(run, rank):
    ranks = [p for p in run.children("trainer") if p.environ().get("RANK") == str(rank)]
    ranks[0].send_signal(signal.SIGKILL)
    psutil.wait_procs(ranks, timeout=100)


def test_a_trainer_goes_on_from_its_last_checkpoint_when_a_rank_is_killed(tmp_path, cache):
    store = tmp_path / "bucket"
    pytest.importorskip("fsspec")
    with started(
        "sort.yaml",
        "policies.solver.trainer.ranks=2",
        "policies.solver.trainer.step_count=6",
        "policies.solver.trainer.checkpoint_every=2",
        f"policies.solver.trainer.store=file://{store}",
        "raas.count=1",
        "raas.sources=store",
        f"rollouts.payloads={{url: file://{tmp_path / 'payloads'}, above_nbytes: 0}}",
        "raas.relay.mode=off",
        "hub.session_ttl_s=1",
        "evals={}",
        runs=tmp_path / "runs",
        cache=cache,
    ) as run:
        run.wait_for_steps(3)
        kill_rank(run, 1)
        code = run.wait(timeout=280)
    assert code == 0, run.output
    assert run.output.count("it goes on from its last") == 1
    log = run.run_dir.log("trainer-solver").read_text()
    # torchrun may ask rank 0 to leave before it has noticed by itself that the other is gone.
    assert "MEMBER_LOST" in log or "asked to leave" in log, log
    assert log.count("MEMBER_LOST") <= 1
    assert "goes on from a checkpoint" in log
    steps = [row["step"] for row in read_json_lines(run.run_dir.metrics)]
    assert max(steps) == 6
    last = max(store.glob("*/solver/*[0-9]"), key=lambda folder: int(folder.name))
    manifests = {path.name for path in last.glob("manifest*")}
    assert manifests == {"manifest-0-of-2", "manifest-1-of-2"}
    (books,) = run.books
    assert books["balanced"]
    # Every token went by way of it.
    rows = [row for path in run.run_dir.rollouts.glob("*") for row in read_json_lines(path)]
    assert rows
    assert all("payload" in each for row in rows for each in row["trajectories"])
    assert "PAYLOAD_LOST" not in str(books)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "kind", "count"),
    [
        ("sort.yaml", "context_parallel", 3),
        ("sort.yaml", "tensor_parallel", 3),
        ("sort-moe.yaml", "expert_parallel", 2),
    ],
)
def test_ranks_that_share_rows_or_experts_train_and_publish(tmp_path, cache, recipe, kind, count):
    with started(
        recipe,
        f"policies.solver.trainer.ranks={count}",
        f"policies.solver.trainer.fsdp.{kind}={count}",
        "policies.solver.trainer.step_count=3",
        "raas.count=1",
        "evals={}",
        runs=tmp_path / "runs",
        cache=cache,
    ) as run:
        code = run.wait(timeout=280)
    assert code == 0, run.output
    rows = read_json_lines(run.run_dir.metrics)
    assert max(row["step"] for row in rows) == 3
    assert max(row["weights/version"] for row in rows) == 3
    (books,) = run.books
    assert books["balanced"]
