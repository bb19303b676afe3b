"""Programs as the event loop sees them: started, awaited, stopped; nothing of them stays."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import unproxied
from astraflow.workflows.kept import supervisor
from astraflow.workflows.kept.supervisor import ProgramLimits

MAX_LINE_NBYTES = 16 * 2**20
"""Of one answer of a `LineWorker`."""

_LAST_WORDS_CHARS = 600
_KEPT_OUTPUT_NBYTES = 2**20


class ExitCause(StrEnum):
    """Why a program ended."""

    EXITED = "exited"
    TIME = "time"
    MEMORY = "memory"
    PROCESSES = "processes"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramExit:
    """What became of a program.

    Attributes:
        ended: Why it ended.
        code: Its exit code, 128 + n for signal n; -1: it was killed at a limit.
    """

    ended: ExitCause
    code: int

    @property
    def is_well(self) -> bool:
        """Whether it ended by itself, with 0."""
        return self.ended is ExitCause.EXITED and self.code == 0


def environment(more: Mapping[str, str], *, url: str = "") -> dict[str, str]:
    """Return what a program gets of the node's environment, and more; no secrets of the run.

    It reaches this machine, and the node at `url`, without a proxy. A program that is not on the
    node's PATH is looked for beside the node's interpreter, as if its environment was activated:
    many a system has a python3 and no python.

    Its libraries have one thread unless `more` says otherwise: OpenBLAS and its like take some
    40 MiB of private memory per thread as soon as they are loaded, and the node may have a thread
    for every processor of a large machine.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")}
    own |= unproxied(own, urlsplit(url).hostname or "")
    own["PATH"] = os.pathsep.join((own.get("PATH", os.defpath), str(Path(sys.executable).parent)))
    return own | {"OMP_NUM_THREADS": "1"} | dict(more)


class Program:
    """A program that runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Take over a supervisor; `start` is the way to get one."""
        self._process = process
        self._reading = asyncio.ensure_future(_line_of(process))

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        limits: ProgramLimits,
        folder: Path,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> "Program":
        """Start a program; `env` is all that it has, the folder gets `stdout` and `stderr`.

        The folder is a temporary one: it is removed when this process is killed.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", supervisor.__file__),
            *(json.dumps(limits), str(folder), *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
        return cls(process)

    async def wait(self) -> ProgramExit:
        """Wait as `fate`; it is stopped when this is cancelled."""
        try:
            return await self.fate()
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def fate(self) -> ProgramExit:
        """Wait until it has ended and nothing of it is left.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED when its supervisor was killed.
        """
        said = await asyncio.shield(self._reading)
        try:
            fate = json.loads(said)
        except ValueError:
            raise AstraflowError(
                Reason.ENVIRONMENT_FAILED,
                f"the keeper of a program ended with {self._process.returncode} and said nothing",
                retryable=True,
            ) from None
        return ProgramExit(ended=ExitCause(fate["why"]), code=fate["code"])

    async def stop(self) -> None:
        """Kill it and all that came of it; idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await asyncio.shield(self._reading)


async def _line_of(process: asyncio.subprocess.Process) -> bytes:
    """Return what a supervisor writes at its end.

    `communicate` closes its standard input at once since Python 3.12, which tells it to stop.
    """
    said = b"" if process.stdout is None else await process.stdout.read()
    await process.wait()
    return said


class ProgramFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder of a program, which may leave anything in it."""

    def cleanup(self) -> None:
        """Remove it, however deep its folders are in each other."""
        try:
            super().cleanup()
        except (OSError, RecursionError):  # It takes a call and a descriptor for each.
            removal = ("rm", "-rf", self.name)
            subprocess.run(removal, check=False, capture_output=True)  # noqa: S603 - its own name


def trim_output(folder: Path) -> None:
    """Empty what a program that stays has written to stdout and stderr so far, if it is much.

    It would fail at its next word once one of them is as large as a file may be.
    """
    for name in ("stdout", "stderr"):
        path = folder / name
        if path.is_file() and path.stat().st_size > _KEPT_OUTPUT_NBYTES:
            os.truncate(path, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LineWorker:
    """A program that answers every line of JSON with one, and stays."""

    program: Program
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    folder: tempfile.TemporaryDirectory[str]

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        arguments: Sequence[str],
        *,
        limits: ProgramLimits,
        env: Mapping[str, str],
    ) -> "LineWorker":
        """Start one; between `command` and `arguments` it is told the descriptor of its line."""
        ours, theirs = socket.socketpair()
        folder = tempfile.TemporaryDirectory(prefix="astraflow-worker-")
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            undo.callback(folder.cleanup)
            program = await Program.start(
                (*command, str(theirs.fileno()), *arguments),
                limits=limits,
                folder=Path(folder.name),
                env=env,
                pass_fds=(theirs.fileno(),),
            )
            undo.pop_all()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_NBYTES)
        return cls(program=program, reader=reader, writer=writer, folder=folder)

    async def ask(self, told: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Send a line, unless there is none, and return the answer; None: it died.

        Raises:
            ValueError: The answer is longer than MAX_LINE_NBYTES; no other will be understood.
        """
        if told is not None:
            trim_output(Path(self.folder.name))
            self.writer.write(json.dumps(told).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()
            answer = await self.reader.readline()
            if answer.endswith(b"\n"):
                return json.loads(answer)
        return None

    @property
    def last_words(self) -> str:
        """The end of what it printed on stderr."""
        path = Path(self.folder.name) / "stderr"
        said = path.read_text("utf-8", "replace") if path.is_file() else ""
        return said.strip()[-_LAST_WORDS_CHARS:]

    async def stop(self) -> None:
        """Kill it and all that came of it."""
        self.writer.close()
        await self.program.stop()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        self.folder.cleanup()
