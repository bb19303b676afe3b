"""A stage: a real run, a tap before it, and the member that is looked at."""

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import BinaryIO, Final, TypeVar

import grpc

from astraflow.conformance.checks import Broken, CheckList
from astraflow.conformance.tap import Call, Tap
from astraflow.core.errors import AstraflowError, Reason
from astraflow.testing.run import LiveRun

POLICY: Final = "solver"
DIGITS: Final = "0123456789"
"""All that prompts and answers are made of: any model has tokens 0 to 9."""

# Processes take their time to start: times the patience.
_START_FACTOR: Final = 2
_LOOK_S: Final = 0.05
# Laws go through all that came; of those that no message breaks, but time, a second more is none.
_JUDGE_S: Final = 1.0
# A connection ends before the process of which it is.
_END_S: Final = 1.0
_LINES: Final = 5
_LINE_LENGTH: Final = 1_000
_READ_NBYTES: Final = 65_536
_SILENT: Final = "nothing on its standard error"
_WAITED_FOR: Final = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)

Found = TypeVar("Found")
Law = Callable[[Tap], str | None]


def first_of(found: Iterable[Found]) -> Found | None:
    return next(iter(found), None)


class ScriptEnded(Exception):  # noqa: N818 - the end of a script, not a defect
    """A check failed; what follows cannot be reached."""


@dataclass(slots=True, kw_only=True, eq=False)
class Stage:
    """What a script of checks works with.

    Who waits here raises Broken for what did not come in time, ScriptEnded for a broken law.

    Attributes:
        laws: What must hold all the time, by the name of its check: returns what broke it.
        model: Whose weights the run has; None: a tensor of its own.
        errors: File that has its standard error: all of it is there once the process has ended.
    """

    run: LiveRun
    tap: Tap
    checks: CheckList
    laws: dict[str, Law]
    patience_s: float
    model: Path | None = None
    peer: asyncio.subprocess.Process | None = None
    errors: BinaryIO | None = None
    _judged: tuple[int, float] = field(default=(-1, 0.0), init=False)

    @contextmanager
    def check(self, name: str) -> Generator[None]:
        """Judge a check by whether the block comes to its end."""
        try:
            yield
            self.require_laws()
        except Broken as broken:
            self.checks.failed(name, str(broken))
            raise ScriptEnded from broken
        except AstraflowError as error:
            self.checks.failed(name, f"{error.message} [{error.reason}]")
            raise ScriptEnded from error
        self.checks.passed(name)

    async def until(
        self, condition: Callable[[], Found | None], what: str, *, patience_s: float | None = None
    ) -> Found:
        """Return what a condition finds, looked at after every message; None: not yet."""
        patience_s = self.patience_s if patience_s is None else patience_s
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while (found := condition()) is None:
                    self.require_laws()
                    await self._next_event(what)
                return found
        refused = first_of(call for call in reversed(self.tap.calls) if _is_refused(call))
        told = refused and f"; last refused was {refused.name}: {refused.text} [{refused.reason}]"
        raise Broken(f"nothing of this came within {patience_s:g} s: {what}{told or ''}")

    async def joined(self, name: str) -> Call:
        """Return the call by which the member joins, and says which contract it has."""
        call = await self.until(
            lambda: first_of(c for c in self.tap.of(name) if c.responses or _is_refused(c)),
            f"an answered {name}",
            patience_s=_START_FACTOR * self.patience_s,
        )
        if not call.responses:
            raise Broken(f"{name} was refused: {call.text} [{call.reason}]")
        if call.requests[0].contract.contract_version < 1:
            raise Broken("contract.contract_version is not set; it is 1 or more")
        return call

    async def call(self, name: str, what: str, *, after: int = 0) -> Call:
        """Return the first call of a method that was answered, of those after the first `after`."""
        return await self.until(
            lambda: first_of(call for call in self.tap.of(name)[after:] if call.responses), what
        )

    async def left(self) -> int:
        """Return the exit code of the peer's process, once it has one; 0 without a process."""
        if self.peer is None:
            return 0
        with suppress(TimeoutError):
            async with asyncio.timeout(self.patience_s):
                return await self.peer.wait()
        raise Broken("the session ended, the process did not")

    def keep_laws(self) -> None:
        """Judge what must hold all the time; at the end of a script."""
        for name, law in self.laws.items():
            broken = law(self.tap)
            if broken is None:
                self.checks.passed(name)
            else:
                self.checks.failed(name, broken)

    def require_laws(self) -> None:
        """Judge what must hold all the time, in the middle of a script."""
        change_count, judged_s = self._judged
        if change_count == self.tap.change_count and monotonic() < judged_s + _JUDGE_S:
            return
        for name, law in self.laws.items():
            if (broken := law(self.tap)) is not None:
                self.checks.failed(name, broken)
                raise ScriptEnded
        self._judged = self.tap.change_count, monotonic()

    async def require_peer(self) -> None:
        """Judge what must hold all the time, after a call to the member failed."""
        self.require_laws()
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                code = await self._end()
                raise Broken(f"the peer ended, exit code {code}; it said: {self.last_lines()}")

    async def _next_event(self, what: str) -> None:
        changed = asyncio.ensure_future(self.tap.changed())
        ended = asyncio.ensure_future(self._end())
        try:
            # Some conditions look at the run, which the tap does not see.
            await asyncio.wait(
                {changed, ended}, return_when=asyncio.FIRST_COMPLETED, timeout=_LOOK_S
            )
            if ended.done():
                self.require_laws()
                raise Broken(
                    f"the peer ended, exit code {ended.result()}, before this came: {what};"
                    f" it said: {self.last_lines()}"
                )
        finally:
            changed.cancel()
            ended.cancel()

    async def _end(self) -> int:
        if self.peer is None:
            await asyncio.Event().wait()
            return 0
        return await self.peer.wait()

    def last_lines(self) -> str:
        """Return the last lines that the peer wrote to its standard error."""
        if self.errors is None:
            return _SILENT
        # The peer writes where the file's position is: it has to stay.
        number = self.errors.fileno()
        read = os.pread(number, _READ_NBYTES, max(0, os.fstat(number).st_size - _READ_NBYTES))
        lines = read.decode(errors="replace").splitlines()[-_LINES:]
        return " | ".join(line.rstrip()[:_LINE_LENGTH] for line in lines) or _SILENT


@asynccontextmanager
async def executed(stage: Stage, command: str | None) -> AsyncGenerator[None]:
    """Run the member; what is left of it and of what it started is killed at the end.

    Args:
        stage: Gets the process.
        command: A line for the shell's words, in which {hub}, {token} and {policy} are replaced;
            they are ASTRAFLOW_HUB, ASTRAFLOW_JOIN_TOKEN and ASTRAFLOW_POLICY in its environment
            too. None: somebody else starts it.

    Raises:
        ScriptEnded: It is no program.
    """
    if command is None:
        yield
        return
    places = {"hub": stage.tap.address, "token": stage.run.join_token, "policy": POLICY}
    words = shlex.split(command)
    for name, value in places.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    told = {
        "ASTRAFLOW_HUB": stage.tap.address,
        "ASTRAFLOW_JOIN_TOKEN": stage.run.join_token,
        "ASTRAFLOW_POLICY": POLICY,
    }
    with TemporaryFile() as errors:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | told,
                start_new_session=True,
            )
        except OSError as error:
            stage.checks.failed(stage.checks.all[0].name, f"'{command}' cannot be started: {error}")
            raise ScriptEnded from error
        stage.peer, stage.errors = process, errors
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            stage.errors = None


def _is_refused(call: Call) -> bool:
    is_ours = call.reason is Reason.SESSION_ENDED or call.service == "TransferService"
    return call.code is not None and call.code not in _WAITED_FOR and not is_ours
