"""Commits: what was decided is carried out once the journal holds why.

Events are decided at once, one after the other. Their records are committed in groups, as many as
came in the milliseconds since the group before, so that durability costs little; effects and
answers wait for the group that they belong to, and keep their order.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import heappop, heappush
from itertools import count
from time import perf_counter

from astraflow.core.effects import Effect
from astraflow.core.events import Event
from astraflow.core.frozen import fast_init
from astraflow.storage.fault_points import FaultPoint, armed, hit
from astraflow.storage.journal import Journal

# A group is carried out without a pause of the event loop.
_GROUP_COUNT = 256
UNSAFE_COUNT = 128
"""Decisions that the journal may be behind; then who sends more waits, for an ack would wait the
longer, and the thread of the journal for its turn."""

# From the begin of one group to that of the next: each costs a thread's turn and a transaction,
# whatever it holds.
_SPACING_S = 0.004


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """One event that the run has decided.

    Attributes:
        event: As the journal has it.
    """

    event: Event
    time: datetime
    answer: object
    effects: tuple[Effect, ...]
    record: bytes


class Commits:
    """A queue from decisions to what comes of them.

    Attributes:
        journal: Gets the records; None: there is none.
        nbytes: Written to the journal so far, without what the journal adds.
        ticket: Number of the newest decision; wait for it with `passed`.
    """

    def __init__(
        self,
        journal: Journal | None,
        carry_out: Callable[[Sequence[Decided]], None],
        *,
        on_commit: Callable[[int, float], None] | None = None,
    ) -> None:
        """Carry out in order; at once where there is no journal."""
        self.nbytes = 0
        self.journal = journal
        self._carry_out = carry_out
        self._on_commit = on_commit
        # What the journal writes now, and what comes after.
        self._writing: list[Decided] = []
        self._waiting = deque[Decided]()
        self._first = 0 if journal is None else journal.end
        self.ticket = 0
        self._safe_count = 0
        self._readers: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = count()
        self._came = asyncio.Event()

    @property
    def position(self) -> int:
        """Place in the journal that the next decision takes."""
        return self._first + self.ticket

    @property
    def pending(self) -> Sequence[Decided]:
        """Decisions that are not carried out yet."""
        return [*self._writing, *self._waiting]

    @property
    def unsafe_count(self) -> int:
        """Decisions that the journal does not hold yet."""
        return self.ticket - self._safe_count

    def put(self, decided: Decided) -> None:
        self.ticket += 1
        if self.journal is None:
            self._safe_count += 1
            self._carry_out([decided])
        else:
            self._waiting.append(decided)
            self._came.set()

    async def passed(self, ticket: int | None = None) -> None:
        """Wait until a decision, None: the newest, and all before it, are safe and carried out."""
        ticket = self.ticket if ticket is None else ticket
        if self._safe_count < ticket:
            reader = asyncio.get_running_loop().create_future()
            self.then(ticket, lambda: reader.done() or reader.set_result(None))
            await reader

    def then(self, ticket: int, call: Callable[[], object]) -> None:
        """Call something once a decision, and all before it, are safe and carried out."""
        if self._safe_count >= ticket:
            call()
        else:
            heappush(self._readers, (ticket, next(self._numbers), call))

    async def run(self, journal: Journal) -> None:
        """Commit groups to the journal, for ever.

        Raises:
            AstraflowError: JOURNAL_FAILED; what waits stays without an answer then.
        """
        due = perf_counter()
        while True:
            await self._came.wait()
            if (wait_s := due - perf_counter()) > 0 and len(self._waiting) < _GROUP_COUNT:
                await asyncio.sleep(wait_s)
            size = min(len(self._waiting), _GROUP_COUNT)
            group = self._writing = [self._waiting.popleft() for _ in range(size)]
            if not self._waiting:
                self._came.clear()
            if armed:
                hit(FaultPoint.JOURNAL_WAITING)
            started = perf_counter()
            due = started + _SPACING_S
            await journal.append([decided.record for decided in group])
            if self._on_commit is not None:
                self._on_commit(size, perf_counter() - started)
            self._complete(group)

    def _complete(self, group: list[Decided]) -> None:
        self.nbytes += sum([len(decided.record) for decided in group])
        self._carry_out(group)
        self._writing = []
        self._safe_count += len(group)
        while self._readers and self._readers[0][0] <= self._safe_count:
            heappop(self._readers)[2]()
