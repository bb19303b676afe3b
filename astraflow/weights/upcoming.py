"""Upcoming: the version that is being encoded, chunk by chunk, for who stands ready for it."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock

from astraflow.codec.chunks import Chunk
from astraflow.core.versions import CodecProfile
from astraflow.weights.links import Compact, Link
from astraflow.weights.stored import StoredPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What can be had of a version just now.

    Attributes:
        chunk: The one that was asked for; None: it is not made yet, or there is none.
        patch: The patch that the chunks are of; None: it is not known yet, or there is none.
        is_over: Whether nothing more comes this way: the store has what there is.
        attempt: Tells attempts to make the same version apart; 0: it is not being made.
    """

    attempt: int = 0
    chunk: Chunk | None = None
    patch: StoredPatch | None = None
    is_over: bool = False


class Upcoming:
    """Shows a version while it is made: one thread makes versions, any event loop listens.

    What it keeps is the newest forward patch, which its store keeps too. Listeners look when they
    have time, so nobody who is slow holds up who makes.

    Attributes:
        nbytes: Payload of the last patch: about what the next one will have.
        compact: What coding it compactly as well has cost.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.compact = Compact()
        self._version = -1
        self._attempt = 0
        self._chunks: list[Chunk] = []
        self._patch: StoredPatch | None = None
        self._is_over = True
        self._is_sparse = True
        self._lock = Lock()
        self._listeners: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @property
    def listener_count(self) -> int:
        """Readers that stand ready."""
        with self._lock:
            return len(self._listeners)

    # What the publisher says, in its thread.

    @contextmanager
    def making(self, version: int) -> Generator[None]:
        """Show a version from now on; what was not said of it by the end is in the store."""
        with self._lock:
            self._version, self._chunks, self._patch = version, [], None
            self._is_over = False
            self._attempt += 1
        try:
            yield
        finally:
            self._is_sparse = self._patch is not None or not self._chunks
            self._is_over = True
            self._tell()

    def add(self, chunk: Chunk) -> None:
        """Show the next chunk of the patch from the version before."""
        self._chunks.append(chunk)
        self._tell()

    def finish(self, patch: StoredPatch) -> None:
        """Show the patch that the chunks are of."""
        self.nbytes, self._patch = patch.info.payload_nbytes, patch
        self._tell()

    # What those ask who stand ready, in their event loops.

    def is_for(self, link: Link, model_nbytes: int) -> bool:
        """Whether a reader has the next version sooner by what is made first.

        A compact patch is made after it, and where nearly all changes nothing may come of it.
        """
        gained_s = 0.0
        if link.goodput_bytes_per_s > 0:
            gained_s = link.gained_s(self.nbytes, model_nbytes, self.compact)
        return self._is_sparse and gained_s <= 0 and CodecProfile.FAST in link.choices()[0]

    def look(self, version: int, index: int) -> Look:
        """Return what there is of a version, and its chunk with an index."""
        with self._lock:
            if self._version < version:
                return Look()
            if self._version > version:
                return Look(is_over=True)
            chunk = self._chunks[index] if index < len(self._chunks) else None
            return Look(
                attempt=self._attempt, chunk=chunk, patch=self._patch, is_over=self._is_over
            )

    @contextmanager
    def listening(self) -> Generator[asyncio.Event]:
        """Give an event that is set whenever there is more to see."""
        news = asyncio.Event()
        with self._lock:
            self._listeners[news] = asyncio.get_running_loop()
        try:
            yield news
        finally:
            with self._lock:
                del self._listeners[news]

    def _tell(self) -> None:
        with self._lock:
            listeners = [*self._listeners.items()]
        for news, loop in listeners:
            with suppress(RuntimeError):  # The loop was closed with all its listeners.
                loop.call_soon_threadsafe(news.set)
