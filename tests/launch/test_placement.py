"""Where processes are to be, and what they would be started with."""

import asyncio
import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.executors.base import code_of_shell
from astraflow.launch.executors.finding import Placement, reachable
from astraflow.launch.executors.slurm import SlurmExecutor, SlurmJob
from astraflow.rpc.access import HubTokens

RECIPE = Path(__file__).parents[2] / "recipes" / "sort.yaml"
TOKENS = HubTokens.generate()
MARK = "the mark of the run"
TOOLS = ("sbatch", "squeue", "scancel", "ssh", "rsync")


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Commands of clusters that are found; they are not called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def recipe(*overrides):
    return load_recipe(RECIPE, overrides)


def placed(tmp_path, *overrides):
    return Placement.of(recipe(*overrides), RunDir(tmp_path / "run"), note=lambda _: None)


def test_a_hub_on_loopback_is_reached_from_other_machines():
    assert reachable(recipe()).hub.listen == "127.0.0.1:0"
    assert reachable(recipe("executor=slurm")).hub.listen == "0.0.0.0:0"
    kept = recipe("executor=slurm", "hub.advertise=login-1")
    assert reachable(kept).hub.listen == "127.0.0.1:0"


@pytest.mark.parametrize(
    ("executor", "reason", "words"),
    [
        (
            "slrm",
            Reason.CODE_UNKNOWN,
            "'slrm' is none of kubernetes, local, ray, skypilot, slurm, ssh",
        ),
        ("{name: slurm, options: {partion: a}}", Reason.INVALID_FIELD, "'partition'"),
        ("{name: ssh}", Reason.INVALID_FIELD, "hosts"),
        ("{name: local, options: {a: 1}}", Reason.INVALID_FIELD, "takes no options"),
    ],
)
def test_what_cannot_be_is_named(tmp_path, tools, executor, reason, words):
    with pytest.raises(AstraflowError) as refused:
        placed(tmp_path, f"executor={executor}")
    assert refused.value.reason is reason
    assert words in refused.value.message


def test_a_missing_command_is_named_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AstraflowError, match=r"sbatch is missing; .*slurm-client") as refused:
        placed(tmp_path, "executor=slurm")
    assert refused.value.reason is Reason.CAPABILITY_MISSING


def test_a_trainer_with_more_ranks_than_a_machine_has_gpus_is_on_several(tmp_path, tools):
    sets = ("policies.solver.trainer.ranks=16", "gpus.count=8", "executor=slurm")
    scripts = placed(tmp_path, *sets).preview(RunDir(tmp_path / "run"))
    trainer = scripts["trainer-solver"]
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in trainer
    assert "--gres=gpu:8" in trainer
    assert "--gres=gpu:1" in scripts["raas-0"]
    assert not [text for text in scripts.values() if "TOKEN=" in text.replace("TOKEN=''", "")]


def test_ranks_that_cannot_be_shared_out_equally_are_refused(tmp_path, tools):
    sets = ("policies.solver.trainer.ranks=12", "gpus.count=8", "executor=slurm")
    with pytest.raises(AstraflowError, match=r"12 ranks .* 8 to a machine"):
        placed(tmp_path, *sets).preview(RunDir(tmp_path / "run"))


def test_gpus_of_hosts_are_planned(tmp_path, tools):
    executor = "executor={name: ssh, options: {hosts: [a, b]}}"
    sets = ("policies.solver.trainer.ranks=2", "gpus.count=2", "raas.count=2", executor)
    plan = placed(tmp_path, *sets).gpus
    assert plan is not None
    assert [(each.name, each.machine, each.gpus) for each in plan.shares] == [
        ("trainer-solver", 0, (0, 1)),
        ("raas-0", 1, (0,)),
        ("raas-1", 1, (1,)),
    ]


def test_secrets_lie_beside_the_script_for_its_user_alone(tmp_path, tools):
    placement = placed(tmp_path, "executor=slurm")
    assert placement.executor is not None
    roles = placement.roles(RunDir(tmp_path / "run"), tokens=TOKENS, models={})
    command = roles.node("raas-0", "h:1")
    script = placement.executor.write_script(command)
    secrets = script.with_suffix(".env")
    assert "export ASTRAFLOW_JOIN_TOKEN=" in secrets.read_text()
    assert "ASTRAFLOW_JOIN_TOKEN" not in script.read_text()
    assert {stat.S_IMODE(each.stat().st_mode) for each in (script, secrets)} == {0o600}


def test_a_machine_that_cannot_read_the_folder_says_so_and_is_not_to_be_tried_again(
    tmp_path, tools
):
    placement = placed(tmp_path, "executor={name: ssh, options: {hosts: [a]}}")
    assert placement.executor is not None
    roles = placement.roles(RunDir(tmp_path / "run"), tokens=TOKENS, models={})
    script = placement.executor.write_script(roles.node("raas-0", "h:1"))
    done = subprocess.run(("sh", script), capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert f"cannot read {tmp_path / 'run' / 'recipe.yaml'}; all machines have to" in done.stderr


def job(state, code):
    return SlurmJob.of({"job_id": 1, "job_state": state, "exit_code": code}).exit_code


def test_the_end_of_a_job_is_read_in_the_schemas_of_old_and_new_releases():
    assert job("RUNNING", 0) is None
    assert job("COMPLETED", 0) == 0
    assert job("FAILED", 78 << 8) == 78
    assert job("FAILED", 9) == -9
    assert job("FAILED", 53) == 78
    assert job("FAILED", 137 << 8) == -9
    assert job("PREEMPTED", 0) == -9
    number = {"set": True, "infinite": False, "number": 1}
    ended = {"return_code": number, "signal": {"id": {"set": False, "number": 0}}}
    assert job(["FAILED"], ended) == 1
    assert job(["COMPLETED"], {"return_code": {"number": 0}, "signal": {"id": 0}}) == 0


@pytest.mark.parametrize(
    "jobs",
    [
        "slurm_load_jobs error",
        "null",
        [1],
        [{"comment": MARK, "job_id": 1}],
        [{"comment": MARK, "job_id": 1, "job_state": [], "exit_code": 0}],
        [{"comment": MARK, "job_id": 1, "job_state": 3, "exit_code": 0}],
        [{"comment": MARK, "job_id": 1, "job_state": "FAILED", "exit_code": None}],
        [{"comment": MARK, "job_id": 1, "job_state": "FAILED", "exit_code": {"signal": 9}}],
    ],
)
async def test_what_squeue_says_is_read_whole_or_refused(tmp_path, tools, jobs):
    said = json.dumps({"jobs": jobs}).replace(MARK, f"astraflow:{tmp_path / 'run'}")
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\ncat <<'.'\n{said}\n.\n")
    executor = placed(tmp_path, "executor=slurm").executor
    assert isinstance(executor, SlurmExecutor)
    with pytest.raises(AstraflowError, match="squeue --json said what cannot be read") as refused:
        await executor.poll()
    assert refused.value.reason is Reason.NOT_READY


async def test_a_command_that_is_away_for_a_while_is_a_cluster_that_does_not_answer(
    tmp_path, tools, monkeypatch
):
    slurm = placed(tmp_path, "executor=slurm").executor
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(AstraflowError, match="squeue") as caught:
        await slurm.poll()
    assert caught.value.reason is Reason.NOT_READY


RSYNC = """#!/bin/sh
echo begun > {folder}/said
read line < {folder}/go
"""


async def test_a_host_that_comes_later_ends_no_fetching(tmp_path, tools):
    for name in ("said", "go"):
        os.mkfifo(tmp_path / name)
    rsync = tmp_path / "bin" / "rsync"
    rsync.write_text(RSYNC.format(folder=tmp_path))
    where = "executor={name: ssh, options: {hosts: [one, two]}}"
    ssh = placed(tmp_path, where).executor
    ssh._shares["one"] = False
    fetching = asyncio.create_task(ssh.fetch(ssh._shares))
    await asyncio.to_thread((tmp_path / "said").read_text)
    ssh._shares["two"] = True
    await asyncio.to_thread((tmp_path / "go").write_text, "on\n")
    await fetching


def test_an_exit_code_of_a_shell_is_the_signal_that_it_stands_for():
    assert [code_of_shell(code) for code in (0, 1, 78, 137, 143)] == [0, 1, 78, -9, -15]
