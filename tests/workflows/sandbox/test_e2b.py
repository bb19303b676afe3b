# ruff: noqa: N818, ASYNC109 - the package's names
"""The adapter of E2B, against a stand-in for the package: a machine is a sandbox of bubblewrap."""

import sys
import types

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.building import build_sandboxes
from astraflow.workflows.rewards.code import CheckCase, CodeTests, OutputCase, judge


class SandboxException(Exception):
    pass


class NotFoundException(SandboxException):
    pass


class InvalidArgumentException(SandboxException):
    pass


class TimeoutException(SandboxException):
    pass


class CommandExitException(SandboxException):
    def __init__(self, exit_code):
        super().__init__(f"exit {exit_code}")
        self.exit_code = exit_code


class Machine:
    """What the package's AsyncSandbox does, by the names that the adapter uses."""

    sandbox_id = "stand-in"
    made = None

    def __init__(self, inside, envs):
        self.inside = inside
        self.envs = envs
        self.commands = self.files = self

    @classmethod
    async def create(cls, *, template, timeout, envs, allow_internet_access):
        assert not allow_internet_access
        return cls(await cls.made(processes=60), envs)

    async def run(self, script, *, cwd, envs, timeout):
        env = self.envs | envs
        done = await self.inside.exec(["bash", "-c", script], cwd=cwd, env=env, time_s=timeout)
        if not done.is_well:
            raise CommandExitException(128 + done.signal if done.signal else done.exit_code)

    async def read(self, path, *, format):  # noqa: A002 - the package's name
        assert format == "bytes"
        try:
            return bytearray(await self.inside.read(path))
        except FileNotFoundError as error:
            raise NotFoundException(str(error)) from error

    async def write(self, path, data):
        try:
            await self.inside.write(path, data)
        except OSError as error:
            raise InvalidArgumentException(str(error)) from error

    async def kill(self):
        await self.inside.close()


@pytest.fixture
async def machine(start, monkeypatch):
    names = (
        SandboxException,
        NotFoundException,
        InvalidArgumentException,
        TimeoutException,
        CommandExitException,
    )
    package = types.ModuleType("e2b")
    package.AsyncSandbox = Machine
    for each in names:
        setattr(package, each.__name__, each)
    monkeypatch.setattr(Machine, "made", staticmethod(start))
    monkeypatch.setitem(sys.modules, "e2b", package)
    provider = build_sandboxes("e2b", {"output_mb": 0.01, "env": {"A": "1"}}, where="options")
    sandbox = await provider.start()
    yield sandbox
    await sandbox.close()


async def test_commands_and_files(machine):
    done = await machine.exec(
        ["sh", "-c", "cat; echo $A$B >&2; exit 3"], stdin=b"\xff", env={"B": "2"}
    )
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"\xff", b"12\n")
    assert (await machine.exec(["sh", "-c", "kill -SEGV $$"])).signal == 11
    await machine.write("a/b", b"\x00")
    assert await machine.read("a/b") == b"\x00"
    assert (await machine.exec(["ls"], cwd="a")).stdout == b"b\n"
    with pytest.raises(FileNotFoundError, match="nothing"):
        await machine.read("nothing")
    with pytest.raises(OSError, match="c"):
        await machine.write("a/b/c", b"")
    flood = await machine.exec(["head", "-c", "100000", "/dev/zero"])
    assert (flood.is_well, flood.is_truncated, len(flood.stdout)) == (True, True, 10485)


async def test_time_ends_a_command_and_all_that_it_started(machine):
    done = await machine.exec(["sh", "-c", "setsid sleep 500 & sleep 500"], time_s=0.5)
    assert done.is_timeout
    # What was killed is listed until it has been reaped.
    while b"sleep" in (await machine.exec(["sh", "-c", "cat /proc/[0-9]*/comm"])).stdout:
        pass


async def test_programs_are_judged(machine):
    add = "def add(a, b): return a + b"
    check = CheckCase(code="def check(f): assert f(1, 2) == 3", entry_point="add")
    cases = (OutputCase(stdin="4", stdout="5"), check, CheckCase(code="assert add(1, 1) == 3"))
    source = f"{add}\nif __name__ == '__main__': print(int(input()) + 1)"
    verdicts = await judge(machine, source, CodeTests(cases=cases), time_s=10.0)
    assert [verdict.why for verdict in verdicts] == ["passed", "passed", "wrong"]
    (hung,) = await judge(machine, "while True: pass", CodeTests(cases=cases[:1]), time_s=0.5)
    assert hung.why == "timeout"


async def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(AstraflowError, match="pip install e2b") as caught:
        await build_sandboxes("e2b", {}, where="options").start()
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED
