"""Manifests of Kubernetes, and what its pods tell."""

import asyncio
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.executors.base import merged
from astraflow.launch.executors.finding import Placement
from astraflow.launch.executors.kubernetes import (
    KubernetesExecutor,
    KubernetesProcess,
    Pod,
    end_of,
)
from astraflow.launch.processes import RoleCommand
from astraflow.rpc.access import HubTokens

RECIPE = Path(__file__).parents[2] / "recipes" / "sort.yaml"
IMAGE = "executor.options.image=lab/astraflow:1"
CLAIM = "executor.options.claim=shared"
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _has_kubectl(tmp_path, monkeypatch):
    (tmp_path / "kubectl").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "kubectl").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def placed(tmp_path, *overrides):
    recipe = load_recipe(RECIPE, ("executor={name: kubernetes}", *overrides))
    return Placement.of(recipe, RunDir(tmp_path / "runs" / "run"), note=lambda _: None)


def manifests(tmp_path, *overrides):
    """Return the Secret and the Job of each process."""
    texts = placed(tmp_path, IMAGE, *overrides).preview(RunDir(tmp_path / "runs" / "run"))
    return {name: list(yaml.safe_load_all(text)) for name, text in texts.items()}


def test_a_copy_of_a_run_has_an_id_of_its_own_and_one_that_was_moved_keeps_it(tmp_path):
    def executor(name):
        recipe = load_recipe(RECIPE, ("executor={name: kubernetes}", IMAGE, CLAIM))
        made = Placement.of(recipe, RunDir(tmp_path / name), note=lambda _: None).executor
        assert made is not None
        return made

    first = executor("first")
    first.keep_run_id()
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    copy = executor("copy")
    assert not copy.has_run_id
    copy.keep_run_id()
    assert executor("copy").run_id == copy.run_id != first.run_id
    (tmp_path / "first").rename(tmp_path / "moved")
    assert executor("moved").run_id == first.run_id


def test_each_process_is_a_job_that_is_not_started_again_by_kubernetes(tmp_path):
    secret, job = manifests(tmp_path, CLAIM, "gpus.count=8")["raas-0"]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert job["spec"]["backoffLimit"] == 0
    assert spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] == 600
    assert container["image"] == "lab/astraflow:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts["runs"] == str(tmp_path / "runs")
    assert {each["name"]: each for each in spec["volumes"]}["secrets"]["secret"] == {
        "secretName": secret["metadata"]["name"],
        "defaultMode": 0o400,
    }
    assert job["metadata"]["labels"]["astraflow/role"] == "raas"
    assert "raas join" in container["command"][-1]


def test_a_trainer_on_two_machines_is_an_indexed_job(tmp_path):
    sets = (CLAIM, "policies.solver.trainer.ranks=16", "gpus.count=8")
    _, job = manifests(tmp_path, *sets)["trainer-solver"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_a_process_whose_metrics_all_see_has_probes(tmp_path):
    found = manifests(tmp_path, CLAIM, "metrics.listen=0.0.0.0:9400")
    for name, port in (("trainer-solver", 9401), ("raas-1", 9403)):
        (container,) = found[name][1]["spec"]["template"]["spec"]["containers"]
        probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness")]
        assert probes == [{"path": "/metrics", "port": port}] * 2
    (container,) = manifests(tmp_path, CLAIM)["raas-0"][1]["spec"]["template"]["spec"]["containers"]
    assert "livenessProbe" not in container


def test_secrets_are_in_a_secret_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "of the hub of models")
    executor = placed(tmp_path, IMAGE, CLAIM).executor
    tokens = HubTokens.generate()
    roles = placed(tmp_path, IMAGE, CLAIM).roles(RunDir(tmp_path), tokens=tokens, models={})
    command = roles.node("raas-0", "h:1")
    assert "export HF_TOKEN='of the hub of models'" in executor.secrets(command)
    (token,) = command.secrets.values()
    shown = json.dumps(executor.job(command, "a")) + executor.preview(command)
    assert token not in shown
    assert "of the hub of models" not in shown


def test_a_pod_takes_more_of_its_spec(tmp_path):
    more = (
        "executor.options.pod={nodeSelector: {gpu: h100}, volumes: [{name: data, hostPath: "
        "{path: /data}}], containers: [{name: astraflow, resources: {requests: {memory: 64Gi}}, "
        "volumeMounts: [{name: data, mountPath: /data}]}]}"
    )
    _, job = manifests(tmp_path, more)["raas-0"]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["nodeSelector"] == {"gpu": "h100"}
    assert container["resources"]["requests"] == {"cpu": "1", "memory": "64Gi"}
    assert {each["name"] for each in spec["volumes"]} == {"data", "secrets", "shm"}
    paths = {each["mountPath"] for each in container["volumeMounts"]}
    assert paths == {"/run/astraflow", "/dev/shm", "/data"}


def test_one_volume_may_be_mounted_twice():
    first, second = ({"name": "data", "mountPath": path} for path in ("/a", "/b"))
    assert merged([first], [second]) == [first, second]
    assert merged({"a": [1]}, {"a": [2], "b": 3}) == {"a": [1, 2], "b": 3}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((CLAIM,), "image"),
        ((IMAGE,), "executor.options.claim: pods have to see the folder"),
        ((IMAGE, CLAIM, "executor.options.mount=/elsewhere"), "is not in /elsewhere"),
    ],
)
def test_what_cannot_be_is_named(tmp_path, overrides, words):
    with pytest.raises(AstraflowError) as refused:
        placed(tmp_path, *overrides)
    assert refused.value.reason is Reason.INVALID_FIELD
    assert words in refused.value.message


def test_a_missing_kubectl_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(AstraflowError, match=r"kubectl is missing; .*kubernetes.io") as refused:
        placed(tmp_path, IMAGE, CLAIM)
    assert refused.value.reason is Reason.CAPABILITY_MISSING


def pod(state=None, **status):
    meta = {"name": "p", "labels": {"job-name": "j"}}
    if gone_by := status.pop("gone_by", None):
        meta["deletionTimestamp"] = gone_by
    if state is not None:
        status["containerStatuses"] = [{"name": "astraflow", "state": state}]
    return Pod.of({"metadata": meta, "status": status}, now=NOW)


def ended(code, **status):
    return pod({"terminated": {"exitCode": code, "reason": "Error"}}, **status)


def test_the_end_of_a_pod_is_that_of_its_process():
    assert pod(phase="Pending").exit_code is None
    assert pod({"running": {}}).exit_code is None
    assert ended(0).exit_code == 0
    assert ended(78).exit_code == 78
    assert ended(137).exit_code == -9


def test_a_pod_that_lost_its_place_counts_as_killed_though_it_ended_well():
    assert ended(0, gone_by="2026-01-01T12:00:00Z").exit_code == -9
    assert ended(0, conditions=[{"type": "DisruptionTarget", "status": "True"}]).exit_code == -9
    assert pod(phase="Failed", reason="Evicted").exit_code == -9


def test_a_machine_that_says_nothing_any_more_is_lost():
    assert pod({"running": {}}, gone_by="2026-01-01T11:59:30Z").exit_code is None
    assert pod({"running": {}}, gone_by="2026-01-01T11:58:00Z").exit_code == -9


class Timed(KubernetesExecutor):
    clock = ManualClock()


@pytest.mark.parametrize("gone_by", ["1999-01-01T00:00:00Z", "2099-01-01T00:00:00Z"])
async def test_a_pod_has_its_time_to_end_whatever_the_clock_of_its_cluster(tmp_path, gone_by):
    meta = {
        "name": "p",
        "labels": {"job-name": "j"},
        "deletionTimestamp": gone_by,
        "deletionGracePeriodSeconds": 600,
    }
    state = {"containerStatuses": [{"name": "astraflow", "state": {"running": {}}}]}
    said = json.dumps({"items": [{"kind": "Pod", "metadata": meta, "status": state}]})
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\necho '{said}'\n")
    known = placed(tmp_path, IMAGE, CLAIM).executor
    executor, codes = Timed(known.place, known.options), []
    for seconds in (0, 650, 20):
        executor.clock.advance(seconds)
        _, (found,) = await executor._state()
        codes.append(found.exit_code)
    assert codes == [None, None, -9]


def test_why_a_pod_waits_is_told():
    full = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes have GPUs"}
    assert pod(phase="Pending", conditions=[full]).trouble == "0/3 nodes have GPUs"
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    assert pod(waiting).trouble == "ImagePullBackOff no such image"
    assert pod({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}).trouble == "OOMKilled"
    assert not pod({"waiting": {"reason": "ContainerCreating"}}).trouble


def ended_as(condition):
    return {"status": {"conditions": [{"type": condition, "status": "True"}]}}


def test_a_process_of_several_pods_ends_as_the_first_that_failed_by_itself():
    job, failed, done = {}, ended_as("Failed"), ended_as("Complete")
    evicted = ended(0, gone_by="2026-01-01T12:00:00Z")
    assert end_of(job, [ended(0), pod({"running": {}})], count=2) is None
    assert end_of(job, [ended(0), ended(0)], count=2) == 0
    assert end_of(failed, [evicted, ended(1)], count=2) == 1
    assert end_of(job, [], count=1) is None
    assert end_of(failed, [], count=1) == -9
    assert end_of(None, [], count=1) == -9
    assert end_of(done, [], count=1) == -9
    assert end_of(done, [ended(0)], count=2) == -9
    assert end_of(None, [pod({"running": {}})], count=1) is None


@pytest.mark.kubernetes
@pytest.mark.parametrize("release", ["1.29.0", "1.37.0"])
def test_manifests_are_valid(tmp_path, release):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    sets = (
        CLAIM,
        "gpus.count=8",
        "policies.solver.trainer.ranks=16",
        "metrics.listen=0.0.0.0:9400",
        "executor.options.service_account=trainers",
        "executor.options.pod={tolerations: [{key: gpu, operator: Exists}]}",
    )
    for each in manifests(tmp_path, *sets).values():
        for manifest in each:
            validator.validate(manifest, release, strict=True)


@pytest.mark.parametrize(
    "said",
    ["", "no json", '{"items": null}', '{"items": [3]}', '{"items": [{"kind": "Pod"}]}'],
)
async def test_what_kubectl_says_is_read_or_refused(tmp_path, said):
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\necho '{said}'\n")
    executor = placed(tmp_path, IMAGE, CLAIM).executor
    assert isinstance(executor, KubernetesExecutor)
    with pytest.raises(AstraflowError, match=r"kubectl .* said what cannot be read") as refused:
        await executor.poll()
    assert refused.value.reason is Reason.NOT_READY


KUBECTL = """#!/bin/sh
case "$*" in *--since=*) exit 0;; esac
if [ -e {folder}/answered ]; then echo begun; exit 0; fi
touch {folder}/answered; exit 1
"""


class Watched(KubernetesExecutor):
    """Sees the end of its pods once kubectl has read a log."""

    poll_s = 0

    async def append_log(self, pod, log, *words):
        code = await super().append_log(pod, log, *words)
        if code == 0:
            for process in self.live.values():
                process.update({}, [])
        return code


FAILING_KUBECTL = """#!/bin/sh
echo "$*" >> {folder}/asked
echo line
"""


class Hasty(KubernetesExecutor):
    """Reads a log twice; in between a minute passes."""

    poll_s, clock = 0, ManualClock()

    async def append_log(self, pod, log, *words):
        await super().append_log(pod, log, *words)
        if words:
            for process in self.live.values():
                process.update({}, [])
            return 0
        asyncio.get_running_loop().call_soon(self.clock.advance, 60)
        return 1


async def test_a_log_is_read_again_from_so_long_before_whatever_the_clock_of_its_machine(tmp_path):
    (tmp_path / "kubectl").write_text(FAILING_KUBECTL.format(folder=tmp_path))
    known = placed(tmp_path, IMAGE, CLAIM).executor
    executor = Hasty(known.place, known.options)
    command = RoleCommand(name="raas-0", arguments=("raas",), log=tmp_path / "raas-0.log")
    process = executor.live["job"] = KubernetesProcess(command, executor, "job")
    process.update({}, [pod({"running": {}})])
    await process._logs["p"]
    first, second = (tmp_path / "asked").read_text().splitlines()
    assert "--since" not in first
    assert "--since=60s" in second.split()
    await executor.close()


async def test_a_log_is_whole_though_the_first_connection_to_it_failed(tmp_path):
    (tmp_path / "kubectl").write_text(KUBECTL.format(folder=tmp_path))
    known = placed(tmp_path, IMAGE, CLAIM).executor
    executor = Watched(known.place, known.options)
    command = RoleCommand(name="raas-0", arguments=("raas",), log=tmp_path / "raas-0.log")
    process = KubernetesProcess(command, executor, "job")
    executor.live["job"] = process
    process.update({}, [pod({"running": {}})])
    await process._logs["p"]
    assert command.log.read_text() == "begun\n"
    await executor.close()
