"""The run's payload store as the hub sees it: what nobody needs any more is removed.

What the run releases is removed soon. What nobody ever named (of a rollout that was refused, or
whose node died before it could send it) is removed once it was there for so long, unnamed, that
nobody will. What cannot be removed now is tried again then: nothing that is named ever goes.
"""

import asyncio
from collections.abc import Callable, Sequence, Set
from typing import Final

import structlog

from astraflow.client.payloads import MARKER
from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError
from astraflow.core.rollouts import PayloadStore
from astraflow.rpc.concurrency import Outbox, together
from astraflow.storage.buckets import Bucket

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# A bucket takes as many in one request.
_AT_ONCE: Final = 1000
_CLEAR_COUNT: Final = 3
_UNNAMED_S: Final = 3600.0
_SWEEP_EVERY_S: Final = 600.0


class PayloadCleaner:
    """Removes payloads.

    Attributes:
        store: Where they are.
        removed_count: So far.
    """

    def __init__(self, store: PayloadStore, *, clock: Clock, unnamed_s: float = _UNNAMED_S) -> None:
        """Open the store.

        Raises:
            AstraflowError: INVALID_FIELD, CAPABILITY_MISSING: see Bucket.
        """
        self.store = store
        self.removed_count = 0
        self._bucket = Bucket(store.url)
        self._clock = clock
        self._unnamed_s = unnamed_s
        self._released: Outbox[str] = Outbox()
        self._seen: dict[str, float] = {}

    async def open(self) -> None:
        """Mark the store, so that members know it.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE.
        """
        await asyncio.to_thread(self._bucket.write, MARKER, b"payloads of a run; see its hub\n")

    def release(self, names: Sequence[str]) -> None:
        """Have payloads removed that the run has no use for."""
        for name in names:
            self._released.put(name)

    async def run(self, named: Callable[[], Set[str]]) -> None:
        """Remove what is released, and what nobody names for long; for ever."""
        await together(self._remove_released(), self._sweep_on(named))

    async def sweep(self, named: Callable[[], Set[str]]) -> None:
        """Remove what nobody has named for long enough.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE.
        """
        there = await asyncio.to_thread(self._bucket.names)
        used, now = named(), self._clock.monotonic()
        self._seen = {
            name: self._seen.get(name, now) for name in there if name not in used and name != MARKER
        }
        late = [name for name, since in self._seen.items() if now - since >= self._unnamed_s]
        await self._remove(late)

    async def clear(self) -> None:
        """Remove all that is there: the run is over."""
        try:
            # What was released last may be removed meanwhile, which ends the removal of a folder.
            for _ in range(_CLEAR_COUNT):
                await asyncio.to_thread(self._bucket.remove, "")
                if not await asyncio.to_thread(self._bucket.names):
                    return
        except AstraflowError as error:
            log.warning("the payload store of the run is left as it is", why=error.message)

    async def _remove_released(self) -> None:
        while True:
            await self._remove(await self._released.take())

    async def _sweep_on(self, named: Callable[[], Set[str]]) -> None:
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            try:
                await self.sweep(named)
            except AstraflowError as error:
                log.warning("the payload store cannot be listed", why=error.message)

    async def _remove(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _AT_ONCE):
            some = names[start : start + _AT_ONCE]
            try:
                await asyncio.to_thread(self._bucket.remove_all, some)
            except AstraflowError as error:
                log.warning("payloads are removed later", count=len(some), why=error.message)
            else:
                self.removed_count += len(some)
