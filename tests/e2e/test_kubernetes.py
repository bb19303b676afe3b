"""A recipe on Kubernetes: kubectl, and an API server whose pods are processes of this machine."""

import json
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import running, started
from .kube_api import kubernetes
from .places import members

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.kubernetes,
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is missing"),
]

OPTIONS = f"image: lab/astraflow, claim: runs, python: {sys.executable}"
ON_KUBERNETES = f"executor={{name: kubernetes, options: {{{OPTIONS}}}}}"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    folder = tmp_path / "kubernetes"
    folder.mkdir()
    with kubernetes(folder) as (made, said):
        for key, value in said.items():
            monkeypatch.setenv(key, value)
        yield made


def processes_of(cluster):
    return sorted(
        each["metadata"]["labels"]["astraflow/process"]
        for each in list(cluster.objects["jobs"].values())
    )


def nothing_is_left(cluster):
    return not any(cluster.objects.values())


def until(run, claim):
    while not claim():
        assert run.is_alive, run.wait()
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(0.05)


def has_joined(run, name):
    log = run.run_dir.log(name)
    return log.exists() and "joined" in log.read_text()


def test_nodes_that_are_killed_or_evicted_are_replaced_and_nothing_is_left(
    tmp_path, cache, cluster
):
    sets = ("policies.solver.trainer.step_count=4000", "evals={}", ON_KUBERNETES)
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        assert processes_of(cluster) == ["raas-0", "raas-1", "trainer-solver"]
        (node,) = members(run, "join", "raas-0")
        token = node.environ()["ASTRAFLOW_JOIN_TOKEN"]
        node.send_signal(signal.SIGKILL)
        until(run, lambda: has_joined(run, "raas-2"))
        pod = next(name for name in list(cluster.objects["pods"]) if name.startswith("raas-1"))
        evict = ("kubectl", "delete", "pod", pod, "--wait=false")
        subprocess.run(evict, check=True, capture_output=True)
        until(run, lambda: has_joined(run, "raas-3"))
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert "raas-0 ended (-9); what it held is issued again" in run.output
    assert "raas-1 ended (-9); what it held is issued again" in run.output
    assert run.summary["state"] == "stopped"
    assert all(account["balanced"] for account in run.books)
    assert token not in json.dumps([each for each in cluster.created if each["kind"] == "Job"])
    assert nothing_is_left(cluster)


def test_jobs_that_a_killed_launcher_left_are_deleted_by_the_run_that_goes_on(
    tmp_path, cache, cluster
):
    sets = ("policies.solver.trainer.step_count=4000", "raas.count=1", "evals={}", ON_KUBERNETES)
    with started("sort.yaml", *sets, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        hub = run.children("dataflow")
        run.process.kill()
        run.wait()
    psutil.wait_procs(hub)
    left = set(cluster.objects["jobs"])
    assert processes_of(cluster) == ["raas-0", "trainer-solver"]
    count = len(read_json_lines(run.run_dir.metrics))
    words = ("run", "--resume", str(run.run_dir.root))
    with running(*words, run_dir=run.run_dir, cache=cache) as again:
        again.wait_for_steps(count + 2)
        assert not left & set(cluster.objects["jobs"])
        again.process.send_signal(signal.SIGINT)
        assert again.wait() == 130, again.output
    assert "Jobs that were left of this run are deleted" in again.output
    assert all(account["balanced"] for account in again.books)
    assert nothing_is_left(cluster)
