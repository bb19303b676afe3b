"""A recipe by SkyPilot: its own API server, whose infrastructure is a Slurm cluster behind ssh."""

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import started
from .places import SSH, SSHD, ask, free_ports, has_slurm, has_sshd, slurm_cluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skypilot,
    pytest.mark.skipif(find_spec("sky") is None, reason="pip install 'skypilot[slurm]' uv"),
    pytest.mark.skipif(not (has_slurm() and has_sshd()), reason="scripts/install_clusters.sh"),
    # Every cluster gets a Python environment of its own from a package index.
    pytest.mark.timeout(1200),
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


def test_clusters_train_and_ctrl_c_leaves_none(tmp_path, cache, slurm):
    with started("sort.yaml", *SETS, runs=tmp_path, cache=cache) as run:
        run.wait_for_steps(2)
        assert len(jobs(slurm)) == 2
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
    assert all(account["balanced"] for account in run.books)
    assert not jobs(slurm)
