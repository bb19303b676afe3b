"""A recipe on hosts by ssh: two real servers, each with files of its own."""

import signal
from pathlib import Path

import psutil
import pytest

from .conftest import ROOT, started
from .places import has_sshd, members, ssh_hosts

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.ssh,
    pytest.mark.skipif(not has_sshd(), reason="needs root, and scripts/install_clusters.sh"),
]


@pytest.fixture
def config(tmp_path, tmp_path_factory, cache):
    (tmp_path / "runs").mkdir()
    folder = tmp_path_factory.mktemp("ssh")
    with ssh_hosts(folder, tmp_path / "runs", cache, ROOT / "recipes") as config:
        yield config


def files_of(process):
    return Path(f"/proc/{process.pid}/ns/mnt").readlink()


def on(config, *hosts):
    return f"executor={{name: ssh, options: {{hosts: {list(hosts)}, args: [-F, {config}]}}}}"


def test_what_is_read_is_copied_what_is_killed_comes_again_and_checkpoints_come_back(
    tmp_path, cache, config
):
    runs = tmp_path / "runs"
    sets = ("policies.solver.trainer.step_count=24", on(config, "one", "two"))
    with started("sort.yaml", *sets, runs=runs, cache=cache) as run:
        run.wait_for_steps(2)
        (trainer,), (node,) = members(run, "trainer"), members(run, "join", "raas-0")
        assert len({files_of(each) for each in (run.process, trainer, node)}) == 3
        assert not [word for word in node.cmdline() if "TOKEN" in word.upper()]
        node.send_signal(signal.SIGKILL)
        assert run.wait() == 0, run.output
    assert "raas-0 ended (-9); what it held is issued again" in run.output
    assert (run.run_dir.checkpoint("solver", 24) / "config.json").exists()
    assert "step" in run.run_dir.log("trainer-solver").read_text()
    assert all(account["balanced"] for account in run.books)
    assert not members(run)


def test_processes_end_with_a_launcher_that_is_killed(tmp_path, cache, config):
    sets = ("policies.solver.trainer.step_count=400", on(config, "one", "two"))
    with started("sort.yaml", *sets, runs=tmp_path / "runs", cache=cache) as run:
        run.wait_for_steps(2)
        processes = [*members(run, "join"), *members(run, "trainer")]
        assert len(processes) == 3
        run.process.kill()
        run.wait()
    _, alive = psutil.wait_procs(processes, timeout=100)
    assert not alive


def test_a_host_that_cannot_be_reached_is_named(tmp_path, cache, config):
    with started("sort.yaml", on(config, "three"), runs=tmp_path / "runs", cache=cache) as run:
        assert run.wait() == 1
    assert "three cannot be reached" in run.output


def test_a_trainer_on_hosts_that_share_no_files_is_refused(tmp_path, cache, config):
    sets = (
        "policies.solver.trainer.ranks=2",
        on(config, "one", "two")[:-2] + ", ranks_per_node: 1}}",
    )
    with started("sort.yaml", *sets, runs=tmp_path / "runs", cache=cache) as run:
        assert run.wait() == 1
    assert "in a folder that they and this machine share" in " ".join(run.output.split())
    assert not members(run)
