"""A recipe on Slurm: a real cluster of two nodes on this machine."""

import signal
import subprocess
from contextlib import suppress

import psutil
import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import astraflow, running, started
from .places import ask, has_slurm, members, slurm_cluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.slurm,
    pytest.mark.skipif(not has_slurm(), reason="Slurm is missing: scripts/install_clusters.sh"),
]

ON_SLURM = ("executor={name: slurm, options: {partition: gpu}}",)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as said:
        yield said


@pytest.fixture(autouse=True)
def _use_slurm(slurm, monkeypatch):
    for key, value in slurm.items():
        monkeypatch.setenv(key, value)


def test_a_folder_that_nodes_do_not_see_is_named_and_nothing_is_tried_again(
    tmp_path, cache, tmp_path_factory, monkeypatch
):
    runs = tmp_path / "runs"
    runs.mkdir()
    with slurm_cluster(tmp_path_factory.mktemp("apart"), f"mount -t tmpfs none {runs}; ") as said:
        for key, value in said.items():
            monkeypatch.setenv(key, value)
        with started("sort.yaml", *ON_SLURM, runs=runs, cache=cache) as run:
            assert run.wait() == 1
        assert jobs(said) == []
    assert "share the folder of the run" in " ".join(run.output.split())
    assert "issued again" not in run.output


def jobs(slurm):
    return ask(slurm, "squeue", "-h", "-o", "%j").split()


def until(run, claim):
    while not claim():
        assert run.is_alive, run.wait()
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.05)


def test_a_killed_node_is_another_job_and_each_has_gpus_of_its_own(tmp_path, cache, slurm):
    sets = ("policies.solver.trainer.step_count=24", "gpus.count=2", *ON_SLURM)
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        assert sorted(jobs(slurm)) == ["raas-0", "raas-1", "trainer-solver"]
        (node,) = members(run, "join", "raas-0")
        assert node.environ()["CUDA_VISIBLE_DEVICES"] in ("0", "1")
        assert "ASTRAFLOW_JOIN_TOKEN" in node.environ()
        assert not [word for word in node.cmdline() if "TOKEN" in word.upper()]
        node.send_signal(signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert "raas-0 ended (-9); what it held is issued again" in run.output
    assert run.run_dir.log("raas-2").exists()
    assert run.summary["steps"] == 24
    assert all(account["balanced"] for account in run.books)
    files = list((run.run_dir.root / "jobs").iterdir())
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert jobs(slurm) == []


def test_a_trainer_on_two_machines_goes_on_when_one_of_its_ranks_is_killed(tmp_path, cache, slurm):
    sets = (
        "policies.solver.trainer.ranks=2",
        "policies.solver.trainer.step_count=6",
        "policies.solver.trainer.checkpoint_every=2",
        "executor={name: slurm, options: {ranks_per_node: 1}}",
        "raas.count=1",
        "evals={}",
    )
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(3)
        ranks = [each for each in members(run, "trainer") if "RANK" in each.environ()]
        assert {each.environ()["SLURMD_NODENAME"] for each in ranks} == {"n1", "n2"}
        next(r for r in ranks if r.environ()["RANK"] == "1").send_signal(signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert run.output.count("it goes on from its last") == 1
    assert max(row["step"] for row in read_json_lines(run.run_dir.metrics)) == 6
    assert all(account["balanced"] for account in run.books)


def test_jobs_that_a_killed_launcher_left_are_cancelled_by_the_run_that_goes_on(
    tmp_path, cache, slurm
):
    sets = ("policies.solver.trainer.step_count=400", *ON_SLURM)
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        run.process.kill()
        run.wait()
    left = members(run, "join")
    count = max(row["step"] for row in read_json_lines(run.run_dir.metrics)) + 40
    more = ("--set", f"policies.solver.trainer.step_count={count}")
    done = astraflow("run", "--resume", str(run.run_dir.root), *more, cache=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.summary["steps"] == count
    psutil.wait_procs(left, timeout=100)
    assert jobs(slurm) == []


def test_ctrl_c_leaves_no_job(tmp_path, cache, slurm):
    sets = ("policies.solver.trainer.step_count=400", *ON_SLURM)
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert run.summary["state"] == "stopped"
    assert all(account["balanced"] for account in run.books)
    assert jobs(slurm) == []


def test_the_pool_grows_by_jobs_and_they_leave_with_the_scaler(tmp_path, cache, slurm):
    sets = (
        "policies.solver.trainer.step_count=4000",
        "raas.count=1",
        "autoscale={min: 2, max: 2}",
        "evals={}",
        *ON_SLURM,
    )
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(1)
        words = ("autoscale", str(run.run_dir.root), "--poll", "0.5")
        with running(*words, run_dir=run.run_dir, cache=cache) as scaler:
            until(run, lambda: [name for name in jobs(slurm) if name.startswith("auto-")])
            until(run, lambda: members(run, "join")[1:])
            scaler.process.send_signal(signal.SIGTERM)
            assert scaler.wait() == 0, scaler.output
        assert sorted(jobs(slurm)) == ["raas-0", "trainer-solver"]
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert all(account["balanced"] for account in run.books)
