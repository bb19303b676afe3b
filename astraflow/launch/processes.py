"""Role processes: started in sessions of their own, never outliving the launcher.

A child gets the read end of a pipe whose write end the launcher keeps (its lifeline): when the
launcher dies in whatever way, the pipe closes, and the child ends by itself. One that may end at
any instant is killed by Linux with its launcher; the pipe is there for what the kernel misses,
which is a launcher that died before the child asked for it.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

LIFELINE = "ASTRAFLOW_LIFELINE_FD"
ORPHAN_RANK = "ASTRAFLOW_RANK_OF_PID"
_ORPHAN_SIGNAL = "ASTRAFLOW_ORPHAN_SIGNAL"
_PR_SET_PDEATHSIG = 1
_LAST_WORDS_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCommand:
    """One process to start.

    Attributes:
        name: For people, logs and the table; unique in the run.
        arguments: Of the `astraflow` command.
        environment: Beside the launcher's own.
        log: Takes what it writes to standard output and error.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    log: Path


class RoleProcess:
    """A started role."""

    def __init__(self, command: RoleCommand, process: asyncio.subprocess.Process) -> None:
        self.command = command
        self._process = process
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        command: RoleCommand,
        *,
        lifeline: int,
        orphan_signal: signal.Signals = signal.SIGTERM,
        on_line: Callable[[str], None] | None = None,
    ) -> "RoleProcess":
        """Start the process; it appends to its log.

        Args:
            command: What to start.
            lifeline: Read end of the launcher's pipe; the child inherits it.
            orphan_signal: How it ends when the launcher is gone; SIGKILL: at once.
            on_line: Told of each line of its standard output, which goes to the log as well.
        """
        said = {LIFELINE: str(lifeline), _ORPHAN_SIGNAL: str(int(orphan_signal))}
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "astraflow",
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log if on_line is None else asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **command.environment, **said},
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        made = cls(command, process)
        if on_line is not None:
            made._reading = asyncio.create_task(made._read(on_line))
        return made

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.returncode

    async def wait(self) -> int:
        """Return its exit code once it has ended, and all that it said was heard."""
        code = await self._process.wait()
        if self._reading is not None:
            await asyncio.shield(self._reading)
        return code

    async def _read(self, on_line: Callable[[str], None]) -> None:
        output = self._process.stdout
        with self.command.log.open("ab", buffering=0) as log:
            while output is not None and (line := await output.readline()):
                log.write(line)
                on_line(line.decode(errors="replace").rstrip())

    def send(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended takes none."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, *, grace_s: float) -> None:
        """Ask it to end; kill it with all its children after `grace_s` seconds."""
        if self.exit_code is None:
            self.send(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), grace_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.wait()

    def last_words(self, count: int = 12) -> str:
        """Return the last lines of its log."""
        lines = self.command.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-count:])


def hold_lifeline(*, first: signal.Signals | None = None) -> None:
    """End this process with the launcher that started it, or soon after, if there is one.

    Called once at the start of a role: a signal when the launcher is gone, SIGKILL when that
    did not end the process in 15 s.

    Args:
        first: The signal; SIGKILL for a process that goes on later where it was, whenever it
            ends. None: what the launcher said.
    """
    descriptor = os.environ.pop(LIFELINE, None)
    said = signal.Signals(int(os.environ.pop(_ORPHAN_SIGNAL, signal.SIGTERM)))
    if os.environ.get(ORPHAN_RANK) == str(os.getppid()) and sys.platform == "linux":
        _die_with_parent()
    if descriptor is None:
        return
    first = first or said
    if first is signal.SIGKILL and sys.platform == "linux":
        _die_with_parent()
    threading.Thread(
        target=_follow, args=(int(descriptor), first), name="lifeline", daemon=True
    ).start()


def _die_with_parent() -> None:
    import ctypes  # noqa: PLC0415 - not for every command

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _follow(descriptor: int, first: signal.Signals) -> None:
    os.read(descriptor, 1)
    os.kill(os.getpid(), first)
    time.sleep(_LAST_WORDS_S)
    os.kill(os.getpid(), signal.SIGKILL)
