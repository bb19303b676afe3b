"""What else a user runs takes nothing of a sandbox, though the kernel bounds it all together."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from astraflow.workflows.sandbox.channel import GUEST, GuestPlace, GuestSandbox
from astraflow.workflows.sandbox.protocol import SandboxLimits

PATH = "/usr/local/bin:/usr/bin:/bin"
PYTHON = shutil.which("python3", path=PATH)
AS_USER = ("--reuid=1000", "--regid=1000", "--clear-groups")

# As docker without namespaces for users: user 1000 of the container is user 1000 of the machine.
DOCKER = f"""#!/bin/sh
PATH={PATH}
[ "$1" = run ] || exit 0
while [ "$1" != image-of-test ]; do shift; done
shift
exec unshare --mount sh -c '
    mount -t tmpfs none /sys/fs/cgroup && echo 40 > /sys/fs/cgroup/pids.max || exit 1
    exec setpriv {" ".join(AS_USER)} "$@"
' sh "$@"
"""
THREADS = """
import threading, time
for _ in range(100): threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
"""

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(os.geteuid()) or PYTHON is None, reason="needs root, and a Python for other users"
    ),
]


@contextmanager
def busy():
    """Have a process of user 1000 with many threads."""
    command = [PYTHON, "-I", "-S", "-c", THREADS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=1000, group=1000) as process:
        process.stdout.readline()
        yield
        process.kill()


async def can_fork(sandbox):
    with busy():
        finished = await sandbox.exec(["sh", "-c", "echo a | cat; echo b"])
    return (finished.stdout, finished.stderr) == (b"a\nb\n", b"")


async def test_of_a_container(start, tmp_path, monkeypatch):
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASTRAFLOW_SANDBOX_IMAGE", "image-of-test")
    assert await can_fork(await start("docker", processes=8))


async def test_of_processes_without_a_sandbox():
    """Also what came after them."""
    command = ("setpriv", *AS_USER, PYTHON, "-I", "-S", "-X", "utf8", "-c", GUEST.read_text())
    place = GuestPlace(
        home="/", env={"PATH": PATH}, task_count=8, beside="all", is_seen=True, is_namespace=False
    )
    sandbox = await GuestSandbox.start(command, limits=SandboxLimits(), place=place)
    try:
        assert await can_fork(sandbox)
        many = "for i in $(seq 20); do sleep 9 & done; echo all"
        finished = await sandbox.exec(["sh", "-c", many])
        assert b"fork" in finished.stderr
        assert finished.stdout == b""
    finally:
        await sandbox.close()
