"""Programs that mean harm, in bubblewrap: none reaches out, all end, the next verdict is right."""

import asyncio
import os
import socket
from pathlib import Path

import psutil
import pytest

from astraflow.workflows.rewards.code import CodeTests, OutputCase, judge
from tests.workflows.sandbox.hostile import PROGRAMS

RIGHT = "the right answer"
TESTS = CodeTests(cases=(OutputCase(stdin="", stdout=RIGHT),))
GOOD = f"print({RIGHT!r})"
# Those that would not end, or break a limit or their sandbox; all others come to their end.
ENDS = {
    "fork bomb": {"timeout"},
    "fork bomb of sessions": {"timeout"},
    "memory of many": {"memory"},
    "endless output": {"output"},
    "endless errors": {"output"},
    "deaf to signals": {"timeout"},
    "kill -9 -1": {"crash"},
    "kill the parent": {"timeout"},
    "stop the parent": {"timeout"},
    "sleep": {"timeout"},
    "endless input": {"timeout"},
    "deep recursion": {"crash", "memory", "timeout"},
    "wild pointer": {"crash"},
    "memory": {"crash"},
    "one large file": {"crash"},
    "threads": {"crash"},
}
BRIEF_S, LONG_S = 0.5, 30.0


class Outside:
    """What a program of a sandbox should not reach."""

    def __init__(self, folder):
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.secret = folder / "canary.txt"
        self.secret.write_text("CANARY")
        self.unix = socket.socket(socket.AF_UNIX)
        self.path = f"/tmp/astraflow-{os.getpid()}.sock"
        Path(self.path).unlink(missing_ok=True)
        self.unix.bind(self.path)
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0astraflow-{os.getpid()}")
        self.sockets = (self.tcp, self.udp, self.unix, self.abstract)
        for each in self.sockets:
            each.setblocking(False)
        self.unix.listen()
        self.abstract.listen()

    def fill(self, program):
        words = {
            "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "socket": self.path,
            "abstract": f"astraflow-{os.getpid()}",
            "secret": self.secret,
            "right": RIGHT,
        }
        for name, value in words.items():
            program = program.replace(f"{{{name}}}", str(value))
        return program

    def assert_untouched(self):
        for each in (self.tcp, self.unix, self.abstract):
            with pytest.raises(BlockingIOError):
                each.accept()
        with pytest.raises(BlockingIOError):
            self.udp.recv(100)
        assert self.secret.read_text() == "CANARY"

    def close(self):
        for each in self.sockets:
            each.close()
        Path(self.path).unlink()


@pytest.fixture
def outside(tmp_path):
    made = Outside(tmp_path)
    yield made
    made.close()


def namespace_of(pid):
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def inside_of(sandbox):
    """Return the PID namespace of a sandbox."""
    below = psutil.Process(sandbox._process.pid).children(recursive=True)
    (inside,) = {namespace_of(each.pid) for each in below} - {namespace_of("self")}
    return inside


def living_in(namespace):
    found = []
    for pid in psutil.pids():
        try:
            if namespace_of(pid) == namespace and psutil.Process(pid).status() != "zombie":
                found.append(pid)
        except (OSError, psutil.Error):
            continue
    return found


def test_there_are_thirty_and_more():
    assert len(PROGRAMS) >= 30
    assert ENDS.keys() <= PROGRAMS.keys()


SLOW = ("memory of many",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PROGRAMS],
)
async def test_a_hostile_program_reaches_nothing(name, start, outside, monkeypatch):
    monkeypatch.setenv("ASTRAFLOW_TEST_SECRET", "CANARY")
    sandbox = await start(processes=24, memory_mb=512)
    inside = inside_of(sandbox)
    program = outside.fill(PROGRAMS[name])
    ends = ENDS.get(name, {"wrong"})
    time_s = BRIEF_S if "timeout" in ends else LONG_S
    (verdict,) = await judge(sandbox, program, TESTS, time_s=time_s)
    assert "REACHED" not in verdict.got + verdict.error
    assert verdict.why in ends, verdict
    outside.assert_untouched()
    if verdict.why != "memory":
        (again,) = await judge(sandbox, GOOD, TESTS, time_s=LONG_S)
        assert again.is_passed
    await sandbox.close()
    while living_in(inside):  # noqa: ASYNC110 - the kernel ends a namespace on its own time
        await asyncio.sleep(0.01)
    (again,) = await judge(await start(), GOOD, TESTS, time_s=LONG_S)
    assert again.is_passed
