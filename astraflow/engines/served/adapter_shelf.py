"""Shelves: the versions of one policy's adapters that a server has."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.served.server import Life


@dataclass(slots=True, kw_only=True, eq=False)
class Adapter:
    """One version.

    Attributes:
        version: Of the policy.
        name: In the server.
        folder: Its files.
        life: Of the server that has it.
        user_count: Generations and pins.
    """

    version: int
    name: str
    folder: Path
    life: Life
    user_count: int = 0


class AdapterShelf:
    """Keeps a version for as long as it is live, pinned or sampled with; then it is let go.

    Attributes:
        live: What is sampled with; None before the first.
        kept: All that the server has, oldest first.
    """

    def __init__(self, place_count: int, let_go: Callable[[Adapter], None]) -> None:
        """Nothing is kept.

        Args:
            place_count: Versions that there is room for.
            let_go: Told of one that nobody needs; `forget` gives its place to another.
        """
        self.live: Adapter | None = None
        self.kept: tuple[Adapter, ...] = ()
        self._pins: list[Adapter] = []
        self._place_count = place_count
        self._let_go = let_go
        self._freed = asyncio.Event()

    @property
    def pinned_versions(self) -> frozenset[int]:
        """What was pinned and not unpinned."""
        return frozenset(adapter.version for adapter in self._pins)

    async def room(self) -> None:
        """Wait until there is a place for another version."""
        while len(self.kept) >= self._place_count:
            self._freed.clear()
            await self._freed.wait()

    def put(self, adapter: Adapter) -> None:
        """Make a version live; the one before ends with what samples with it."""
        before, self.live = self.live, adapter
        self.kept = (*self.kept, adapter)
        if before is not None:
            self._settle(before)

    def forget(self, adapter: Adapter) -> None:
        """Give a place free."""
        self.kept = tuple(kept for kept in self.kept if kept is not adapter)
        self._freed.set()

    @contextmanager
    def using(self, version: int | None, life: Life) -> Generator[Adapter]:
        """Sample with a version during the body; None: the live one.

        Raises:
            AstraflowError: VERSION_NOT_SERVED.
        """
        adapter = self._take(version, life)
        try:
            yield adapter
        finally:
            self._drop(adapter)

    def pin(self, version: int, life: Life) -> None:
        """Keep a version that is live or pinned.

        Raises:
            AstraflowError: VERSION_NOT_SERVED.
        """
        self._pins.append(self._take(version, life))

    def unpin(self, version: int) -> None:
        """Take one pin back."""
        pinned = next((each for each in self._pins if each.version == version), None)
        if pinned is not None:
            self._pins.remove(pinned)
            self._drop(pinned)

    def _take(self, version: int | None, life: Life) -> Adapter:
        candidates = (self.live, *(self._pins if version is not None else ()))
        for adapter in candidates:
            if adapter and adapter.life is life and version in (None, adapter.version):
                adapter.user_count += 1
                return adapter
        wanted = "no version" if version is None else f"version {version} is not"
        raise AstraflowError(
            Reason.VERSION_NOT_SERVED, f"{wanted} served by the engine now", retryable=True
        )

    def _drop(self, adapter: Adapter) -> None:
        adapter.user_count -= 1
        self._settle(adapter)

    def _settle(self, adapter: Adapter) -> None:
        if not adapter.user_count and adapter is not self.live:
            self._let_go(adapter)
