"""Clusters on this machine, which end with their block, and the processes that runs have there."""

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

CONFIG = """ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=2
InactiveLimit=0
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 Gres=gpu:2 State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def has_slurm() -> bool:
    return all(map(shutil.which, ("slurmctld", "slurmd", "sbatch")))


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody has."""
    while True:
        first = random.randrange(20_000, 32_000)
        try:
            for port in range(first, first + count):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return first


@contextmanager
def slurm_cluster(folder: Path, mounts: str = "") -> Iterator[dict[str, str]]:
    """Start the daemons; yield what the environment of its users says.

    Args:
        folder: For settings and states.
        mounts: Commands that give each node other files than this machine has.
    """
    host, port = socket.gethostname(), free_ports(3)
    # GPUs are device nodes that nobody opens.
    (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/tty[0-1]\n")
    (folder / "slurm.conf").write_text(
        CONFIG.format(
            host=host,
            port=port,
            first=port + 1,
            second=port + 2,
            folder=folder,
            user=os.environ.get("USER", "root") if os.getuid() else "root",
        )
    )
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    said = {"SLURM_CONF": str(folder / "slurm.conf")}
    unshare = ("unshare", "--mount", "sh", "-c") if mounts else ("sh", "-c")
    commands = (
        ("slurmctld", "-D"),
        *((*unshare, f"{mounts}exec slurmd -D -N {node}") for node in ("n1", "n2")),
    )
    daemons = [
        subprocess.Popen(
            command, env={**os.environ, **said}, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        for command in commands
    ]
    try:
        while ask(said, "sinfo", "-h", "-o", "%T%D").strip() != "idle2":
            assert not [each.args for each in daemons if each.poll() is not None]
        yield said
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(60)


def ask(said: dict[str, str], *command: str) -> str:
    """Return what a command of Slurm says; nothing where the controller is not there yet."""
    done = subprocess.run(
        command, env={**os.environ, **said}, capture_output=True, text=True, check=False
    )
    return done.stdout


SSHD = """Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
"""
SSH = """Host {host}
HostName 127.0.0.1
Port {port}
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def has_sshd() -> bool:
    """Whether hosts can be made here, each with files of its own."""
    return not os.getuid() and all(map(shutil.which, ("sshd", "ssh", "rsync", "unshare")))


@contextmanager
def ssh_hosts(folder: Path, *hidden: Path) -> Iterator[Path]:
    """Start two hosts, `one` and `two`; yield the configuration of ssh that knows them.

    Args:
        folder: For keys and settings.
        hidden: Folders of this machine that each host has its own of, empty.
    """
    for name in ("key", "host_key"):
        make = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        subprocess.run(make, check=True)
    first = free_ports(2)
    Path("/run/sshd").mkdir(exist_ok=True)
    config, daemons = folder / "config", []
    mounts = "".join(f"mount -t tmpfs none {each}; " for each in hidden)
    for port, host in enumerate(("one", "two"), first):
        with config.open("a") as file:
            file.write(SSH.format(host=host, port=port, folder=folder))
        settings = folder / f"sshd_{host}"
        settings.write_text(SSHD.format(port=port, folder=folder))
        serve = f"{mounts}exec {shutil.which('sshd')} -D -e -f {settings}"
        with (folder / f"{host}.log").open("w") as log:
            daemons.append(
                subprocess.Popen(("unshare", "--mount", "sh", "-c", serve), stdout=log, stderr=log)
            )
    try:
        for host in ("one", "two"):
            while subprocess.run(("ssh", "-F", config, host, "true"), check=False).returncode:
                assert not [each.args for each in daemons if each.poll() is not None]
        yield config
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(60)


def members(run, *words):
    """Return the processes of a run, which are no children of its launcher, with these words."""
    found = []
    for each in psutil.process_iter():
        try:
            argv = each.cmdline()
        except psutil.Error:
            continue
        if {str(run.run_dir.recipe), *words} <= set(argv) and "srun" not in argv[0]:
            found.append(each)
    return found
