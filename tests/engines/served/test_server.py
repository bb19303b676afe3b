"""Servers are started, watched and started again: real processes that are no models."""

import asyncio
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.served import server as servers_module
from astraflow.engines.served.dialect import ServerCommand
from astraflow.engines.served.server import (
    InferenceServer,
    IsAlive,
    ServerMeter,
    end_silence,
    environment,
    kept_command,
)
from astraflow.rpc.concurrency import Backoff, beside

PAGE = """
import sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
"""


async def answers(http: httpx.AsyncClient) -> bool:
    return (await http.get("/")).is_success


def command(*argv: str) -> ServerCommand:
    return ServerCommand(argv=(sys.executable, "-S", "-c", *argv))


def keeper() -> psutil.Process:
    """Return the process that keeps the server; tests before may have left others."""
    (found,) = [each for each in psutil.Process().children() if PAGE in each.cmdline()]
    return found


Make = Callable[..., InferenceServer]


@pytest.fixture
async def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes servers that run until the end of the test."""
    monkeypatch.setattr(servers_module, "_TOKEN_S", 1.0)
    servers: list[InferenceServer] = []
    async with asyncio.TaskGroup() as group:

        def make(
            launch: Callable[[int], ServerCommand], is_alive: IsAlive = answers
        ) -> InferenceServer:
            server = InferenceServer(
                is_alive=is_alive,
                wake=answers,
                launch=launch,
                url=None,
                log_file=tmp_path / "logs" / "server.log",
                start_s=30,
                on_lost=lambda: None,
            )
            servers.append(server)
            group.create_task(server.run())
            return server

        yield make
        for server in servers:
            server.close()


def test_a_server_reaches_itself_without_a_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "lab")
    assert environment(command(PAGE, "0"))["no_proxy"] == "lab,127.0.0.1,localhost"


@pytest.mark.slow
async def test_a_server_that_was_killed_is_started_again(make: Make):
    server = make(lambda port: command(PAGE, str(port)))
    http = await server.wait_up()
    life = server.life
    os.kill(keeper().children()[0].pid, signal.SIGKILL)
    assert "ended with code 137" in (await life.over).message
    other = await server.wait_up()
    assert await answers(other)
    assert other.base_url != http.base_url


@pytest.mark.slow
async def test_a_server_that_stands_still_while_something_runs_is_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers_module, "_SILENT_S", 0.1)
    server, meter = make(lambda port: command(PAGE, str(port))), ServerMeter()
    await server.wait_up()
    life = server.life
    silence = end_silence(server, meter)
    async with beside(silence):
        with meter.running():
            os.kill(keeper().children()[0].pid, signal.SIGSTOP)
            assert "no token" in (await life.over).message
        assert await answers(await server.wait_up())


async def test_a_server_that_cannot_start_says_why(make: Make):
    server = make(lambda port: command("raise SystemExit('no such model')"))
    with pytest.raises(AstraflowError, match="no such model") as caught:
        await server.wait_up()
    assert caught.value.reason is Reason.ENGINE_FAILED


async def test_of_a_long_log_only_the_end_is_read(make: Make):
    said = "import os; os.truncate(1, 1 << 28); raise SystemExit('no more')"
    tracemalloc.start()
    try:
        with pytest.raises(AstraflowError, match="no more"):
            await make(lambda port: command(said)).wait_up()
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


async def test_a_server_that_ends_as_it_answers_for_the_first_time_is_started_again(make: Make):
    ports: list[int] = []

    def launch(port: int) -> ServerCommand:
        ports.append(port)
        return command(PAGE if len(ports) > 1 else "raise SystemExit('no more')", str(port))

    async def ends_as_it_answers(_: httpx.AsyncClient) -> bool:
        if len(ports) == 1:
            await asyncio.wait([server.life.over])
        return True

    server = make(launch, ends_as_it_answers)
    with pytest.raises(AstraflowError, match="no more"):
        await server.wait_up()
    await server.wait_up()


@pytest.mark.parametrize("is_there", [True, False])
async def test_what_a_server_is_waited_for_ends_when_it_is_closed(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun = asyncio.Event()

    async def wake(_: httpx.AsyncClient) -> None:
        begun.set()
        if is_there:
            await asyncio.Event().wait()
        raise AstraflowError(Reason.INVALID_FIELD, "it serves another model")

    monkeypatch.setattr(Backoff, "pause_s", lambda *_: 1e6)
    server = InferenceServer(
        is_alive=answers,
        wake=wake,
        launch=None,
        url="http://127.0.0.1:1",
        log_file=tmp_path / "server.log",
        start_s=30,
        on_lost=lambda: None,
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run())
        await begun.wait()
        if not is_there:
            with pytest.raises(AstraflowError, match="another model"):
                await server.wait_up()
        server.close()


@pytest.mark.slow
async def test_a_server_that_is_condemned_ends_before_the_next_one_serves(make: Make):
    server = make(lambda port: command(PAGE, str(port)))
    http = await server.wait_up()
    old = str(http.base_url)
    server.condemn("its weights are of no version", server.life)
    await server.wait_up()
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(base_url=old, trust_env=False) as late:
            await late.get("/")


async def test_after_close_nothing_is_served(make: Make):
    server = make(lambda port: command(PAGE, str(port)))
    await server.wait_up()
    server.close()
    with pytest.raises(AstraflowError, match="closed"):
        _ = server.http


def test_a_server_ends_with_whoever_started_it():
    """The keeper's standard input closes when the node is gone, however it went."""
    launch = ServerCommand(argv=("sh", "-c", "echo up; sleep 1000"))
    with subprocess.Popen(
        kept_command(launch), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"up\n"
        server = psutil.Process(keeper.pid).children(recursive=True)
        keeper.communicate()
    assert server
    assert not any(is_alive(each) for each in server)


def is_alive(process: psutil.Process) -> bool:
    """Return whether it runs: one that nobody has buried does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
