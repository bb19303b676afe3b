"""Containers, by a program that does what docker does to the user of a container."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

# As docker without namespaces for users: user 1000 of the container is user 1000 of the machine.
DOCKER = """#!/bin/sh
PATH=/usr/local/bin:/usr/bin:/bin
[ "$1" = run ] || exit 0
while [ "$1" != image-of-test ]; do shift; done
shift
exec unshare --mount sh -c '
    mount -t tmpfs none /sys/fs/cgroup && echo 40 > /sys/fs/cgroup/pids.max || exit 1
    exec setpriv --reuid=1000 --regid=1000 --clear-groups "$@"
' sh "$@"
"""
THREADS = """
import threading, time
for _ in range(100): threading.Thread(target=time.sleep, args=(60,)).start()
print(flush=True)
"""


@pytest.mark.root
@pytest.mark.slow
async def test_a_container_has_its_processes_whatever_others_of_its_user_have(
    start, tmp_path, monkeypatch
):
    if os.geteuid() or shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip("needs root, and a python3 that other users can run")
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASTRAFLOW_SANDBOX_IMAGE", "image-of-test")
    with busy():
        sandbox = await start("docker", processes=8)
        finished = await sandbox.exec(["sh", "-c", "echo a | cat; echo b"])
    assert (finished.stdout, finished.stderr) == (b"a\nb\n", b"")


@contextmanager
def busy():
    command = ["/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", "python3", "-c", THREADS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=1000, group=1000) as process:
        process.stdout.readline()
        yield
        process.kill()
