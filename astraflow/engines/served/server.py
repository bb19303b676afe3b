"""Servers: started, watched and started again, or attached to; and how busy they are."""

import asyncio
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from time import perf_counter

import httpx
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.checks import engine_closed, engine_failed
from astraflow.engines.protocol import EngineLoad
from astraflow.engines.served import lifeline
from astraflow.engines.served.dialect import CONNECT_S, Dialect, ServerCommand
from astraflow.rpc.address import unproxied
from astraflow.rpc.concurrency import Backoff, beside

# What reading an answer of another form than expected raises.
OTHER_FORM = (LookupError, TypeError, ValueError)

_KEPT_LINES = 15

_KEPT_ERRORS = 5

_KEPT_LENGTH = 500

# Of a log, which has lines of days: what a server says of its end takes less.
_READ_NBYTES = 1 << 20

# The line of a traceback that names the error, bare or behind a logger's prefix.
_NAMED = re.compile(
    r"^(?:\([^)]*\) )?(?:[A-Z]+ [\d:./ -]+\[[^\]]*\] )?((?:\w+\.)*\w+(?:Error|Exception): .+)$",
    re.MULTILINE,
)


def last_words(log: str) -> str:
    """Return the errors that a log names, the first ones first, and its last lines.

    A server of several processes ends with the errors of those that waited for the one that
    failed; what that one said stands far above.
    """
    errors = [said[:_KEPT_LENGTH] for said in dict.fromkeys(_NAMED.findall(log))][:_KEPT_ERRORS]
    lines = log.splitlines()
    last = lines[-_KEPT_LINES:]
    return "\n".join([*errors, "..." if len(lines) > len(last) else "", *last]).strip()


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_LOOK_EVERY_S = 0.2

# That one token may take.
_TOKEN_S = 30.0

# Of all but completions, which take as long as they take. Loading a large model is the longest.
_CALL_S = 600.0

_OWN = frozenset(("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "ASTRAFLOW_JOIN_TOKEN"))

# What shells say of SIGKILL.
_KILLED = 137

IsAlive = Callable[[httpx.AsyncClient], Awaitable[bool]]

Wake = Callable[[httpx.AsyncClient], Awaitable[object]]


class Life:
    """One life of a server, from its start to its end; it begins without weights of the run.

    Attributes:
        up: What reaches it, once it has generated a token; fails when it never does.
        over: Why it ended.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.up: asyncio.Future[httpx.AsyncClient] = loop.create_future()
        self.over: asyncio.Future[AstraflowError] = loop.create_future()

    @property
    def is_up(self) -> bool:
        return self.up.done() and not self.up.exception() and not self.over.done()

    def end(self, why: AstraflowError) -> None:
        """Note its end; the first reason counts."""
        if not self.over.done():
            self.over.set_result(why)
        if not self.up.done():
            self.up.set_exception(why)
            self.up.exception()

    async def failed(self) -> None:
        """Wait for its end.

        Raises:
            AstraflowError: ENGINE_FAILED: why it ended.
        """
        raise await asyncio.shield(self.over)


class InferenceServer:
    """A server that is started again whenever it ends, or one that somebody else runs."""

    def __init__(
        self,
        *,
        is_alive: IsAlive,
        wake: Wake,
        launch: Callable[[int], ServerCommand] | None,
        url: str | None,
        log_file: Path,
        start_s: float,
        on_lost: Callable[[], None],
        is_changing: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start nothing yet.

        Args:
            is_alive: Whether it generates.
            wake: Makes sure of one that runs already (INVALID_FIELD: it is the wrong one) and has
                it go on; whoever had it before may have left it paused.
            launch: Returns how to start it at a port; None: it runs at `url`.
            url: Of one that runs already.
            log_file: Takes what it writes.
            start_s: Seconds that a start may take.
            on_lost: Told when a life is over.
            is_changing: Whether its version changes: it generates nothing then.
        """
        self._is_alive = is_alive
        self._wake = wake
        self._launch = launch
        self._url = url
        self._log_file = log_file
        self._start_s = start_s
        self._on_lost = on_lost
        self._is_changing = is_changing
        self._is_closed = False
        self.life = Life()

    async def run(self) -> None:
        backoff, failed_count = Backoff(first_s=1.0, limit_s=30.0), 0
        while not self._is_closed:
            life = self.life
            async with AsyncExitStack() as stack:
                await self._live(life, stack)
            if not self._is_closed:
                log.error("the server is lost", why=life.over.result().message)
                failed_count = 1 if life.up.exception() is None else failed_count + 1
                # The next life is over before it begins when this is closed.
                await asyncio.wait([self.life.over], timeout=backoff.pause_s(failed_count))

    async def wait_up(self) -> httpx.AsyncClient:
        """Return what reaches it, once it has generated a token.

        Raises:
            AstraflowError: ENGINE_FAILED with the last lines of its log: this start failed; the
                next one follows.
        """
        return await asyncio.shield(self.life.up)

    @property
    def http(self) -> httpx.AsyncClient:
        """Reaches it.

        Raises:
            AstraflowError: ENGINE_FAILED, retryable, while it does not serve.
        """
        self.require_open()
        if not self.life.is_up:
            raise engine_failed("the server is being started")
        return self.life.up.result()

    def require_open(self) -> None:
        """Reject work after `close`.

        Raises:
            AstraflowError: ENGINE_FAILED.
        """
        if self._is_closed:
            raise engine_closed()

    def close(self) -> None:
        """Take no more work; who runs it cancels it."""
        self._is_closed = True
        self.life.end(engine_closed())

    async def check_alive(self) -> None:
        """See whether it still generates; it is started again if not."""
        life = self.life
        if not life.is_up or self._is_changing() or await self._answers(life.up.result()):
            return
        # A change that began meanwhile may take longer than a token.
        if not self._is_changing():
            self.condemn("it generates no token", life)

    def condemn(self, why: str, life: Life) -> None:
        """End a life: what it holds cannot be trusted any more. One that is over stays over."""
        self._end(life, engine_failed(why))

    def _end(self, life: Life, why: AstraflowError) -> None:
        """End a life; whoever waits from now on waits for the next one."""
        life.end(why)
        if self.life is life and not self._is_closed:
            self.life = Life()
            self._on_lost()

    async def _live(self, life: Life, stack: AsyncExitStack) -> None:
        """Start it, and return when its life is over."""
        try:
            process, log_start, url = await self._start(stack)
            http = _client(url)
            stack.push_async_callback(http.aclose)
            async with beside(self._watch(process, life, log_start), self._wait_alive(http, life)):
                await asyncio.shield(life.over)
        except AstraflowError as error:
            self._end(life, error)
        except Exception as error:  # noqa: BLE001 - or there would be no next life, and no error
            self._end(life, engine_failed(f"the server cannot be used: {error!r}"))

    async def _start(
        self, stack: AsyncExitStack
    ) -> tuple[asyncio.subprocess.Process | None, int, str]:
        """Start it; it appends to its log, and ends with this process at the latest.

        Returns:
            The process, None where somebody else runs it; where its part of the log begins; its
            address.
        """
        if self._launch is None:
            return None, 0, self._url or ""
        port = free_port()
        launch = self._launch(port)
        self._log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._log_file.open("ab") as output:
            log_start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *kept_command(launch),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment(launch),
                start_new_session=True,
            )
        stack.push_async_callback(_ended, process)
        return process, log_start, f"http://127.0.0.1:{port}"

    async def _wait_alive(self, http: httpx.AsyncClient, life: Life) -> None:
        """Wait for a real token: from then on it serves."""
        until = time.monotonic() + self._start_s
        while not (await self._is_awake(http) and await self._answers(http)):
            if time.monotonic() > until:
                raise engine_failed(f"the server generated nothing in {self._start_s:.0f} s")
            await asyncio.sleep(_LOOK_EVERY_S)
        # It may have ended as it answered.
        if not life.over.done():
            log.info(
                "the server generates", url=str(http.base_url).rstrip("/"), log=str(self._log_file)
            )
            life.up.set_result(http)

    async def _is_awake(self, http: httpx.AsyncClient) -> bool:
        """Wake one that runs already; False: it is not there yet."""
        if self._launch is not None:
            return True
        try:
            await self._wake(http)
        except httpx.HTTPError:
            return False
        except AstraflowError as error:
            if error.reason is Reason.INVALID_FIELD:
                raise
            return False
        return True

    async def _watch(
        self, process: asyncio.subprocess.Process | None, life: Life, log_start: int
    ) -> None:
        if process is not None:
            code = await process.wait()
            with self._log_file.open("rb") as written:
                written.seek(max(log_start, self._log_file.stat().st_size - _READ_NBYTES))
                said = last_words(written.read().decode(errors="replace"))
            killed = " (killed, as a machine without memory does)" if code == _KILLED else ""
            self._end(
                life, engine_failed(f"the server ended with code {code}{killed}; it said:\n{said}")
            )

    async def _answers(self, http: httpx.AsyncClient) -> bool:
        try:
            return await asyncio.wait_for(self._is_alive(http), _TOKEN_S)
        except (AstraflowError, TimeoutError, httpx.HTTPError):
            return False


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Ask a server to end, with all its processes; it is killed when it does not."""
    if process.stdin is not None:
        process.stdin.close()
    await process.wait()


def _client(url: str) -> httpx.AsyncClient:
    # A line per request otherwise.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # As many requests as the node has rollouts. Servers (uvicorn) close a connection that is idle
    # for 5 s: one is let go well before, or a request on it would fail now and then.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
    timeout = httpx.Timeout(_CALL_S, connect=CONNECT_S)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False)


def kept_command(launch: ServerCommand) -> tuple[str, ...]:
    """Return the command that keeps a server for as long as its standard input is open."""
    return (sys.executable, "-S", lifeline.__file__, *launch.argv)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(launch: ServerCommand) -> dict[str, str]:
    """Return the node's environment without what belongs to the node's own interpreter."""
    kept = {name: value for name, value in os.environ.items() if name not in _OWN}
    return {**kept, **unproxied(kept), **launch.env}


_ASK_EVERY_S = 1.0


class ServerMeter:
    """Counts requests and tokens here, and asks the server for what only it knows."""

    def __init__(self) -> None:
        self.running_count = 0
        self._sampled_count = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._reported = EngineLoad()

    @contextmanager
    def running(self) -> Generator[None]:
        if not self.running_count:
            self._busy_since = perf_counter()
        self.running_count += 1
        try:
            yield
        finally:
            self.running_count -= 1
            if not self.running_count:
                self._busy_s += perf_counter() - self._busy_since

    def note_sampled(self, count: int) -> None:
        self._sampled_count += count

    @property
    def progress(self) -> tuple[int, int]:
        """What rises as long as tokens come, here or, by its own word, in the server."""
        return self._sampled_count, self._reported.sampled_token_count

    def load(self) -> EngineLoad:
        """Return the load; what the server said is up to a second old, and nothing when idle."""
        running = self.running_count
        queued = min(self._reported.queued_count, running)
        return EngineLoad(
            running_count=running - queued,
            queued_count=queued,
            sampled_token_count=self._sampled_count,
            kv_fraction=self._reported.kv_fraction if running else 0.0,
            busy_s=self._busy_s + (perf_counter() - self._busy_since if running else 0.0),
        )

    async def follow(self, server: InferenceServer, dialect: Dialect) -> None:
        """Ask the server again and again while something runs, until cancelled."""
        while True:
            if self.running_count:
                with suppress(AstraflowError, httpx.HTTPError, *OTHER_FORM):
                    self._reported = await dialect.load(server.http)
            await asyncio.sleep(_ASK_EVERY_S)


_SILENT_S = 60.0


async def end_silence(server: InferenceServer, meter: ServerMeter) -> None:
    """Look whether a server still generates when nothing comes of what runs, until cancelled."""
    heard = meter.progress
    while True:
        await asyncio.sleep(_SILENT_S)
        if meter.running_count and meter.progress == heard:
            await server.check_alive()
        heard = meter.progress
