"""Watches: versions, evaluations and the run itself, sent to whoever wants to see them change."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import timedelta

from astraflow.core.evals import EvalRun
from astraflow.core.ids import EvalRunId, PolicyId
from astraflow.core.status import RunStatus, SavedRun
from astraflow.core.versions import VersionInfo


class Topic:
    """Counts the changes of a thing and wakes those who wait for the next one.

    Example:
        `seen = topic.revision`, look at the thing, `await topic.passed(seen)`, look again.
        A change between the look and the wait is never missed.
    """

    def __init__(self) -> None:
        self.revision = 0
        self._next: asyncio.Event | None = None

    def touch(self) -> None:
        """Count a change and wake the watchers, all with one event."""
        self.revision += 1
        if self._next is not None:
            self._next.set()
            self._next = None

    async def passed(self, revision: int) -> None:
        """Wait until there was a change after `revision`."""
        while self.revision <= revision:
            if self._next is None:
                self._next = asyncio.Event()
            await self._next.wait()


_KEPT = 64


class VersionBoard:
    """The announcements of one policy, the newest per version."""

    def __init__(self) -> None:
        self.topic = Topic()
        self._announced: dict[int, tuple[int, VersionInfo]] = {}

    def announce(self, info: VersionInfo) -> None:
        """Show a version to all watchers; a repeat replaces what it said before."""
        self.topic.touch()
        self._announced.pop(info.version, None)
        self._announced[info.version] = (self.topic.revision, info)
        if len(self._announced) > _KEPT:
            del self._announced[next(iter(self._announced))]

    def since(self, revision: int) -> list[VersionInfo]:
        """Return what was announced after a revision, oldest version first."""
        fresh = [info for seen, info in self._announced.values() if seen > revision]
        return sorted(fresh, key=lambda info: info.version)


class Watches:
    """Wakes the watchers of a run.

    Attributes:
        evals: All evaluations.
        saves: Checkpoints of the run.
        state: Of the run: its watchers look at once.
        change: Anything: the watchers of the run look when their time comes.
    """

    def __init__(self) -> None:
        self._boards: dict[PolicyId, VersionBoard] = defaultdict(VersionBoard)
        self.evals = Topic()
        self.saves = Topic()
        self.state = Topic()
        self.change = Topic()

    def announce(self, info: VersionInfo) -> None:
        """Wake the watchers of a policy's versions."""
        self._boards[info.policy_id].announce(info)

    async def versions(
        self, policy_id: PolicyId, known: tuple[VersionInfo, ...], *, after: int | None
    ) -> AsyncIterator[VersionInfo]:
        """Yield the versions that are known and then each announcement, for ever.

        Args:
            policy_id: Whose.
            known: What can be pulled now.
            after: Versions up to this one are of no interest; None: all are.
        """
        board = self._boards[policy_id]
        least = -1 if after is None else after
        fresh = list(known)
        while True:
            seen = board.topic.revision
            for info in fresh:
                if info.version > least:
                    yield info
            await board.topic.passed(seen)
            fresh = board.since(seen)

    async def eval_run(
        self, eval_run_id: EvalRunId, look: Callable[[EvalRunId], EvalRun]
    ) -> AsyncIterator[EvalRun]:
        """Yield an evaluation now and after each change, until it is final."""
        last: EvalRun | None = None
        while last is None or not last.state.is_final:
            seen = self.evals.revision
            run = look(eval_run_id)
            if run != last:
                yield run
                last = run
            else:
                await self.evals.passed(seen)

    async def saved(self, look: Callable[[], SavedRun | None], *, every_s: float) -> SavedRun:
        """Return a checkpoint of the run once it is there.

        Args:
            look: Returns it; None: not yet. What it raises is raised here.
            every_s: It is asked so often at least, since a trainer may leave meanwhile.
        """
        while (found := look()) is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self.saves.passed(self.saves.revision)
        return found

    async def status(
        self, look: Callable[[], RunStatus], *, interval: timedelta
    ) -> AsyncIterator[RunStatus]:
        """Yield the run now and after changes, until it is final.

        A new state is shown at once; other changes wait until `interval` has passed.
        """
        while True:
            state, change = self.state.revision, self.change.revision
            status = look()
            yield status
            if status.state.is_final:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(interval.total_seconds()):
                    await self.state.passed(state)
            if self.state.revision == state:
                await self.change.passed(change)
