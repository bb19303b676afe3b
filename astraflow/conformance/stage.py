"""A stage: a real run, a tap before it, and the member that is looked at."""

import asyncio
import os
import shlex
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from astraflow.conformance.checks import Broken, CheckList
from astraflow.conformance.tap import Call, Tap
from astraflow.testing.run import LiveRun

POLICY: Final = "solver"
DIGITS: Final = "0123456789"
"""All that prompts and answers are made of: any model has tokens 0 to 9."""

_START_S: Final = 60.0
_LOOK_S: Final = 0.05
_LINES: Final = 5

Found = TypeVar("Found")
Law = Callable[[Tap], str | None]


class Settled(Exception):  # noqa: N818 - the end of a script, not a defect
    """A check failed; what follows cannot be reached."""


@dataclass(slots=True, kw_only=True, eq=False)
class Stage:
    """What a script of checks works with.

    Attributes:
        run: The run behind the tap.
        tap: What the member dials.
        checks: To be judged.
        laws: What must hold all the time, by the name of its check: returns what broke it.
        patience_s: How long one thing is waited for.
        model: Whose weights the run has; None: a tensor of its own.
        peer: The process of the member; None: somebody else starts it.
    """

    run: LiveRun
    tap: Tap
    checks: CheckList
    laws: dict[str, Law]
    patience_s: float
    model: Path | None = None
    peer: asyncio.subprocess.Process | None = None
    _told: list[str] = field(default_factory=list[str])

    @contextmanager
    def check(self, name: str) -> Generator[None]:
        """Judge a check by whether the block comes to its end.

        Raises:
            Settled: It did not.
        """
        try:
            yield
            self.require_laws()
        except Broken as broken:
            self.checks.failed(name, str(broken))
            raise Settled from broken
        self.checks.passed(name)

    async def until(
        self, condition: Callable[[], Found | None], what: str, *, patience_s: float | None = None
    ) -> Found:
        """Return what a condition finds, looked at after every message.

        Args:
            condition: None: not yet.
            what: Is waited for, for the finding.
            patience_s: How long; None: that of the stage.

        Raises:
            Broken: It did not come in time, or the process of the peer ended first.
            Settled: A law was broken meanwhile.
        """
        patience_s = self.patience_s if patience_s is None else patience_s
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while (found := condition()) is None:
                    self.require_laws()
                    await self._next_event()
                return found
        raise Broken(f"nothing of this came within {patience_s:g} s: {what}")

    async def joined(self, name: str) -> Call:
        """Return the call by which the member joins; processes take their time to start."""
        return await self.until(
            lambda: next((call for call in self.tap.of(name) if call.responses), None),
            f"an answered {name}",
            patience_s=max(self.patience_s, _START_S),
        )

    async def call(self, name: str, what: str, *, after: int = 0) -> Call:
        """Return the first call of a method that was answered, of those after the first `after`."""
        return await self.until(
            lambda: next((call for call in self.tap.of(name)[after:] if call.responses), None), what
        )

    async def left(self) -> int:
        """Return the exit code of the peer's process, once it has one; 0 without a process.

        Raises:
            Broken: It does not end.
        """
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
        """Judge what must hold all the time, in the middle of a script.

        Raises:
            Settled: A law was broken.
        """
        for name, law in self.laws.items():
            if (broken := law(self.tap)) is not None:
                self.checks.failed(name, broken)
                raise Settled

    async def _next_event(self) -> None:
        changed = asyncio.ensure_future(self.tap.changed())
        ended = asyncio.ensure_future(self._end())
        try:
            # Some conditions look at the run, which the tap does not see.
            await asyncio.wait(
                {changed, ended}, return_when=asyncio.FIRST_COMPLETED, timeout=_LOOK_S
            )
            if ended.done():
                self.require_laws()
                raise Broken(f"the peer ended, exit code {ended.result()}: {self.said()}")
        finally:
            changed.cancel()
            ended.cancel()

    async def _end(self) -> int:
        if self.peer is None:
            await asyncio.Event().wait()
            return 0
        return await self.peer.wait()

    def said(self) -> str:
        """Return the last lines that the peer wrote to its standard error."""
        return " | ".join(self._told[-_LINES:]) or "it wrote nothing to its standard error"

    async def listen(self, process: asyncio.subprocess.Process) -> None:
        """Keep what the peer writes to its standard error."""
        while process.stderr and (line := await process.stderr.readline()):
            self._told.append(line.decode(errors="replace").rstrip())


@asynccontextmanager
async def executed(stage: Stage, command: str | None) -> AsyncGenerator[None]:
    """Run the member; what is left of it at the end is killed.

    Args:
        stage: Gets the process.
        command: A line for the shell's words, in which {hub}, {token} and {policy} are replaced;
            they are ASTRAFLOW_HUB, ASTRAFLOW_JOIN_TOKEN and ASTRAFLOW_POLICY in its environment
            too. None: somebody else starts it.
    """
    if command is None:
        yield
        return
    process = await asyncio.create_subprocess_exec(
        *_words(command, stage),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | _environment(stage),
    )
    stage.peer = process
    listening = asyncio.ensure_future(stage.listen(process))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await listening


def _words(command: str, stage: Stage) -> Sequence[str]:
    places = {"hub": stage.tap.address, "token": stage.run.join_token, "policy": POLICY}
    words = shlex.split(command)
    for name, value in places.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    return words


def _environment(stage: Stage) -> dict[str, str]:
    return {
        "ASTRAFLOW_HUB": stage.tap.address,
        "ASTRAFLOW_JOIN_TOKEN": stage.run.join_token,
        "ASTRAFLOW_POLICY": POLICY,
    }
