"""A recipe by SkyPilot: its own API server, whose infrastructure is a Slurm cluster behind ssh."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import astraflow, running, started
from .places import SSH, SSHD, ask, free_ports, has_slurm, has_sshd, slurm_cluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skypilot,
    pytest.mark.skipif(find_spec("sky") is None, reason="pip install 'skypilot[slurm]' uv"),
    pytest.mark.skipif(not (has_slurm() and has_sshd()), reason="scripts/install_clusters.sh"),
    # Every cluster gets a Python environment of its own from a package index.
    pytest.mark.timeout(3600),
]

# SkyPilot gets uv by curl, and an interpreter by that.
CURL = """#!/bin/sh
case "$*" in *uv/install.sh*) cat <<'END'
mkdir -p "$UV_INSTALL_DIR"
cat >"$UV_INSTALL_DIR/uv" <<'UV'
#!/bin/bash
for word in "$@"; do words+=("${{word/#3.10/{python}}}"); done
UV_SYSTEM_CERTS=true exec {uv} "${{words[@]}}"
UV
chmod +x "$UV_INSTALL_DIR/uv"
END
;; *) exec {curl} "$@" ;; esac
"""

ON_SKYPILOT = (
    f"executor={{name: skypilot, options: {{python: {sys.executable}, autodown_minutes: null, "
    "task: {resources: {infra: slurm/lab}}}}"
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Yield what the environment of SkyPilot says, and that of Slurm."""
    folder = tmp_path_factory.mktemp("lab")
    home, there = folder / "home", folder / "there"
    for each in (home / ".slurm", there, folder / "slurm"):
        each.mkdir(parents=True)
    shutil.copy(shutil.which("curl"), folder / "real-curl")
    curl = CURL.format(
        python=Path(sys.base_prefix, "bin", "python3"),
        uv=shutil.which("uv"),
        curl=folder / "real-curl",
    )
    (folder / "curl").write_text(curl)
    (folder / "curl").chmod(0o755)
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + "127.0.0.1 n1 n2\n")
    mounts = "".join(
        f"mount --bind {folder / name} {target}; "
        for name, target in (("curl", shutil.which("curl")), ("hosts", "/etc/hosts"))
    )
    for name in ("key", "host_key"):
        make = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        subprocess.run(make, check=True)
    said = {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    with slurm_cluster(folder / "slurm", mounts) as slurm:
        port = free_ports(1)
        variables = f"SetEnv SLURM_CONF={slurm['SLURM_CONF']} HOME={there}\n"
        settings = SSHD.format(port=port, folder=folder) + variables
        (folder / "sshd").write_text(settings + "Subsystem sftp internal-sftp\n")
        (home / ".slurm" / "config").write_text(
            SSH.format(host="lab", port=port, folder=folder) + "User root\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        with (folder / "sshd.log").open("w") as log:
            serve = (str(shutil.which("sshd")), "-D", "-e", "-f", str(folder / "sshd"))
            daemon = subprocess.Popen(serve, stdout=log, stderr=log)
        sky(said, "api", "start")
        try:
            assert "Slurm: enabled" in sky(said, "check", "slurm")
            yield said, slurm
        finally:
            sky(said, "api", "stop")
            daemon.terminate()
            daemon.wait(60)


def sky(said, *words):
    environment = {**os.environ, **said, "NO_COLOR": "1", "COLUMNS": "160"}
    done = subprocess.run(
        ("sky", *words), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def slurm(lab, monkeypatch):
    said, slurm = lab
    for key, value in said.items():
        monkeypatch.setenv(key, value)
    return slurm


def jobs(slurm):
    return set(ask(slurm, "squeue", "-h", "-o", "%i").split())


SETS = ("policies.solver.trainer.step_count=40000", "raas.count=1", "evals={}", ON_SKYPILOT)


@contextmanager
def resumed(run, *sets, cache):
    more = [part for each in sets for part in ("--set", each)]
    words = ("run", "--resume", str(run.run_dir.root), *more)
    with running(*words, run_dir=run.run_dir, cache=cache) as again:
        yield again


def step_count(run):
    return max(row["step"] for row in read_json_lines(run.run_dir.metrics))


def test_a_run_goes_on_after_ctrl_c_and_after_its_launcher_was_killed(tmp_path, cache, slurm):
    with started("sort.yaml", *SETS, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        assert len(jobs(slurm)) == 2
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert all(account["balanced"] for account in run.books)
    assert not jobs(slurm)
    stopped_at = step_count(run)
    with resumed(run, cache=cache) as run:
        run.wait_for_steps(stopped_at + 2)
        left = jobs(slurm)
        assert len(left) == 2
        run.process.kill()
        run.wait()
    count = step_count(run) + 20
    with resumed(run, f"policies.solver.trainer.step_count={count}", cache=cache) as run:
        run.wait_for_log("trainer-solver", f"step={count} ")
        assert not left & jobs(slurm)
        assert run.wait() == 0, run.output
    assert "clusters that were left of this run go down" in " ".join(run.output.split())
    assert not jobs(slurm)
    steps = [row["step"] for row in read_json_lines(run.run_dir.metrics)]
    assert set(steps) == set(range(1, count + 1))
    # Draining it was at rest.
    assert {steps.count(step) for step in range(1, stopped_at + 1)} == {1}
    assert all(account["balanced"] for account in run.books)
    ledger = astraflow("ledger", str(run.run_dir.root), "--json", cache=cache)
    assert json.loads(ledger.stdout)["holds"], ledger.stdout + ledger.stderr


def test_ctrl_c_leaves_nothing_of_clusters_that_are_not_up_yet(tmp_path, cache, slurm):
    with started("sort.yaml", *SETS, runs=tmp_path, cache=cache) as run:
        while not jobs(slurm):
            assert run.is_alive, run.wait()
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert not jobs(slurm)
