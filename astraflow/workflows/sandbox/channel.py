"""The owner's end of a guest: any command that starts one where programs may run is a sandbox."""

import asyncio
import contextlib
import marshal
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.protocol import PolicyFault
from astraflow.workflows.sandbox.protocol import Finished, Sandbox, SandboxLimits

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

GUEST = Path(__file__).with_name("guest.py")
_STARTING_S = 60.0
# What a guest may be late at a time limit, killing what ran; on a machine that is busy.
_LATE_S = 10.0
_LOOK_S = 0.25
_MOST_PARTS = 16
# What is resident beside the programs, and the pages that all share.
_GUEST_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestPlace:
    """What a guest finds where it runs.

    Attributes:
        home: Folder that relative paths start at, and commands without another.
        env: All variables of a command that asks for no more.
        task_count: Processes and threads that may be there.
        beside: What its user, whose processes the kernel bounds, has elsewhere: nothing, other
            containers (a control group bounds each, where the machine lets it), or all else.
        is_seen: Its processes are this machine's: the memory of all together is watched.
        is_namespace: All of them end when the first one is killed.
        kill_command: Ends one whose guest does not.
        on_close: Called when all has ended.
    """

    home: str
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    task_count: int
    beside: Literal["nothing", "containers", "all"] = "nothing"
    is_seen: bool
    is_namespace: bool
    kill_command: tuple[str, ...] = ()
    on_close: Callable[[], None] | None = None


class GuestSandbox:
    """A sandbox that holds a guest (`guest.py`), with which it speaks over two pipes."""

    def __init__(
        self, process: asyncio.subprocess.Process, limits: SandboxLimits, place: GuestPlace
    ) -> None:
        """Take over a guest; `start` is the way to get one."""
        self._process = process
        self.limits = limits
        self._place = place
        self._turn = asyncio.Lock()
        self._ending = ""

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        limits: SandboxLimits,
        place: GuestPlace,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> "GuestSandbox":
        """Start a guest and wait until it is ready; without an `env` it has that of this process.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED with what the command said.
        """
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
                env=env,
            )
        except OSError as error:
            raise cannot_start(f"{command[0]}: {error.strerror}") from error
        sandbox = cls(process, limits, place)
        try:
            async with asyncio.timeout(_STARTING_S):
                parts = await _receive(sandbox._stdout, limits)
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            sandbox._kill()
            said = b"" if process.stderr is None else await process.stderr.read(4096)
            await sandbox.close()
            nothing = f"it ended with {process.returncode} and said nothing"
            why = said.decode("utf-8", "replace").strip() or nothing
            raise cannot_start(f"{Path(command[0]).name}: {why}") from error
        except BaseException:
            await sandbox.close()
            raise
        if parts != [b"ready"]:
            await sandbox.close()
            raise cannot_start(f"{Path(command[0]).name} started no guest")
        return sandbox

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        time_s: float | None = None,
    ) -> Finished:
        """Run a command; see `Sandbox.exec`."""
        asked = {
            "do": "exec",
            "command": list(command),
            "stdin": stdin,
            "cwd": self._path(cwd or ""),
            "env": {**self._place.env, **(env or {})},
        }
        return (await self.run(asked, time_s=time_s))[0]

    async def read(self, path: str) -> bytes:
        """Return a file; see `Sandbox.read`."""
        nbytes = self.limits.file_mb * 2**20
        said = await self._request({"do": "read", "path": self._path(path), "file_nbytes": nbytes})
        if said is None:
            raise self._lost()
        if said[0] != b"ok":
            raise FileNotFoundError(f"{path}: {said[1].decode('utf-8', 'replace')}")
        return said[1]

    async def write(self, path: str, data: bytes) -> None:
        """Write a file; see `Sandbox.write`."""
        said = await self._request({"do": "write", "path": self._path(path), "data": data})
        if said is None:
            raise self._lost()
        if said[0] != b"ok":
            raise OSError(f"{path}: {said[1].decode('utf-8', 'replace')}")

    async def run(
        self, asked: Mapping[str, Any], *more: Any, time_s: float | None = None
    ) -> tuple[Finished, bytes]:
        """Have the guest run something: a command, a program, a call, or tests.

        Args:
            asked: `do`, and what that takes (guest.py).
            more: What is sent after the request.
            time_s: Seconds; None: `SandboxLimits.time_s`.

        Returns:
            What became of it, and the result of a call or of tests.
        """
        time_s = time_s or self.limits.time_s
        bounds = _bounds(
            self.limits,
            time_s,
            task_count=self._place.task_count,
            beside=self._place.beside,
        )
        said = await self._request({**asked, **bounds}, *more, time_s=time_s)
        if said is not None:
            return _finished(said)
        ended = self._ending
        is_timeout, is_out_of_memory = ended == "time", ended == "memory"
        lost = Finished(
            exit_code=None,
            signal=9,
            is_timeout=is_timeout,
            is_out_of_memory=is_out_of_memory,
            is_lost=True,
        )
        return lost, b""

    async def close(self) -> None:
        """End it and all that runs in it; idempotent."""
        process, place = self._process, self._place
        if process.stdin is not None:
            process.stdin.close()
        if not place.is_namespace and process.returncode is None:
            # A guest whose owner has hung up kills what runs, and ends.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _LATE_S)
            if process.returncode is None:
                await self._kill_tree()
        self._kill()
        await process.wait()
        await _drained(process)
        if place.on_close is not None:
            place.on_close()

    async def _kill_tree(self) -> None:
        """Kill all processes of a guest that does not do it."""
        if self._place.kill_command:
            null = asyncio.subprocess.DEVNULL
            killer = await asyncio.create_subprocess_exec(
                *self._place.kill_command, stdout=null, stderr=null
            )
            await killer.wait()
        if self._place.is_seen:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()

    @property
    def _stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None  # noqa: S101 - it was started with a pipe
        return self._process.stdout

    def _path(self, path: str) -> str:
        return posixpath.join(self._place.home, path)

    def _lost(self) -> PolicyFault:
        why = {"time": "did not end in time", "memory": "took too much memory"}
        return PolicyFault(
            f"an earlier command {why.get(self._ending, 'killed it')}: the sandbox has ended"
        )

    async def _request(
        self, asked: Mapping[str, Any], *more: Any, time_s: float = _STARTING_S
    ) -> list[bytes] | None:
        """Ask the guest; None when what runs beside it has ended it.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED when the sandbox was ended from outside.
            PolicyFault: It was lost before.
        """
        async with self._turn:
            if self._ending:
                raise self._lost()
            sent = _framed(dict(asked), *more)
            answer = asyncio.ensure_future(self._answer(sent))
            try:
                if not await self._watch(answer, time_s + _LATE_S):
                    self._give_up()
                    return None
                return await answer
            except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
                await self._ended_by(error)
                return None
            except BaseException:
                # Cancelled: what it would answer is of nobody.
                self._ending = "cancelled"
                self._give_up()
                raise
            finally:
                answer.cancel()

    async def _watch(self, answer: "asyncio.Future[list[bytes]]", time_s: float) -> bool:
        """Wait for an answer while the memory of all processes is looked at; False: give it up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + time_s
        while not (await asyncio.wait({answer}, timeout=_LOOK_S))[0]:
            if self._place.is_seen and await asyncio.to_thread(self._took_too_much):
                self._ending = "memory"
            elif loop.time() > deadline:
                self._ending = "time"
            if self._ending:
                return False
        return True

    def _took_too_much(self) -> bool:
        total = 0
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    total += process.memory_info().rss
        return total > self.limits.memory_mb * 2**20 + _GUEST_NBYTES

    async def _ended_by(self, error: Exception) -> None:
        """Tell what a program did to the guest from what was done to the sandbox.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED when its first process, which no program inside can
                reach, was killed by a signal.
        """
        self._ending = "killed"
        if isinstance(error, ValueError):
            self._give_up()
            return
        code = await self._process.wait()
        if code > 0 and self._process.stderr is not None:
            said = (await self._process.stderr.read(4096)).decode("utf-8", "replace").strip()
            log.warning("the guest of a sandbox failed at a program", said=said[-1000:])
        if self._place.is_namespace and code < 0:
            raise AstraflowError(
                Reason.ENVIRONMENT_FAILED,
                f"a sandbox was killed from outside by signal {-code}; does the machine have too "
                "little memory?",
                retryable=True,
            ) from error

    async def _answer(self, sent: bytes) -> list[bytes]:
        assert self._process.stdin is not None  # noqa: S101 - it was started with a pipe
        self._process.stdin.write(sent)
        await self._process.stdin.drain()
        return await _receive(self._stdout, self.limits)

    def _give_up(self) -> None:
        """End what runs: with its first process, where that is all; else the guest has to do it."""
        if self._place.is_namespace:
            self._kill()
        elif self._process.stdin is not None:
            self._process.stdin.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def _bounds(
    limits: SandboxLimits, time_s: float, *, task_count: int, beside: str = "nothing"
) -> dict[str, Any]:
    return {
        "time_s": time_s,
        "memory_nbytes": limits.memory_mb * 2**20,
        "file_nbytes": limits.file_mb * 2**20,
        "output_nbytes": int(limits.output_mb * 2**20),
        "task_count": task_count,
        "beside": beside,
    }


async def run_inside(
    sandbox: Sandbox, asked: Mapping[str, Any], *more: Any, time_s: float
) -> tuple[Finished, bytes]:
    """Have a guest run something in a sandbox; one that holds none gets it as a command.

    Args, returns and raises: as `GuestSandbox.run`.
    """
    if isinstance(sandbox, GuestSandbox):
        return await sandbox.run(asked, *more, time_s=time_s)
    limits = sandbox.limits
    bounds = _bounds(limits, time_s, task_count=limits.processes + 2)
    command = ("python3", "-I", "-S", "-X", "utf8", "-c", GUEST.read_text(encoding="utf-8"))
    sent = _framed({**asked, **bounds, "is_only": True}, *more)
    finished = await sandbox.exec(command, stdin=sent, time_s=time_s + _LATE_S)
    said = asyncio.StreamReader()
    said.feed_data(finished.stdout)
    said.feed_eof()
    answers: list[list[bytes]] = []
    # What is cut off is left.
    with contextlib.suppress(asyncio.IncompleteReadError, ValueError):
        while len(answers) < 2:
            answers.append(await _receive(said, limits))
    if len(answers) > 1:
        return _finished(answers[1])
    if not answers and finished.exit_code is not None:
        why = finished.stderr[-300:].decode("utf-8", "replace")
        raise cannot_start(f"python3 is not in it, or runs no guest: {why}")
    return replace(finished, is_lost=True), b""


async def _receive(stream: asyncio.StreamReader, limits: SandboxLimits) -> list[bytes]:
    """Read one answer; what a guest says is not trusted.

    Raises:
        asyncio.IncompleteReadError: It has ended.
        ValueError: It is no answer.
    """
    read = stream.readexactly
    count = int.from_bytes(await read(4), "little")
    if count > _MOST_PARTS:
        raise ValueError("the guest answered nonsense")
    header = await read(4 * count)
    sizes = [int.from_bytes(header[at : at + 4], "little") for at in range(0, 4 * count, 4)]
    most = max(limits.file_mb * 2**20, int(limits.output_mb * 2**20))
    if any(size > most + 4096 for size in sizes):
        raise ValueError("the guest answered too much")
    return [await read(size) for size in sizes]


def _framed(*requests: Any) -> bytes:
    frames = [marshal.dumps(each, 2) for each in requests]
    return b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames)


def _finished(said: Sequence[bytes]) -> tuple[Finished, bytes]:
    """Return what a guest says of what it ran, and the result."""
    why, code, stdout, stderr, result, truncated = said
    number = int(code)
    finished = Finished(
        exit_code=number if number >= 0 else None,
        signal=-number if number < 0 else None,
        stdout=stdout,
        stderr=stderr,
        is_timeout=why == b"time",
        is_truncated=truncated == b"1",
    )
    return finished, result


async def _drained(process: asyncio.subprocess.Process) -> None:
    """Read what is left, so that the pipes are closed before the loop is."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                await stream.read()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            await process.stdin.wait_closed()


def cannot_start(why: str) -> AstraflowError:
    """Return the error of a sandbox that cannot start here."""
    return AstraflowError(Reason.ENVIRONMENT_FAILED, f"no sandbox starts here: {why}")
