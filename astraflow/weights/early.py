"""Early: chunks are decoded over what is held while others of their patch still arrive.

What is decoded counts only once the state that all of it makes is verified; see `state.stage`.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np

from astraflow.codec.changes import Change
from astraflow.codec.chunks import Chunk
from astraflow.codec.decode import decode_change
from astraflow.weights.frame import Frame
from astraflow.weights.incoming import Incoming
from astraflow.weights.state import HeldState, bits_in
from astraflow.wire.patches import PatchIndex

_Decoded = tuple[Chunk, Future[Change | None]]


class EarlyDecoder:
    """Decodes verified chunks of the patches that start from what is held, in a thread.

    It listens to a pull as `fetch.Progress`; `decode` takes the place of `decode_change`. What is
    held must stay as it is from `over` to `clear`.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="astraflow-decode")
        self._held: HeldState | None = None
        self._incoming: Incoming | None = None
        # By the chunk's identity, which lives as long as the entry.
        self._decoded: dict[int, _Decoded] = {}
        self._seen: dict[bytes, int] = {}

    def over(self, held: HeldState | None) -> None:
        """Take note of what the next patches start from; None: nothing, and all is left alone."""
        self.clear()
        self._held = held

    def begin(self, incoming: Incoming, frame: Frame) -> None:
        """Take note of a pull that begins."""
        del frame
        self._incoming = incoming
        self._seen = {}

    def note(self) -> None:
        """Look at what has come."""
        if self._held is None or self._incoming is None:
            return
        for index, chunks in self._incoming.arriving():
            if index.patch.base_version != self._held.version:
                return
            root = index.patch.root_digest
            for chunk in islice(chunks.values(), self._seen.get(root, 0), None):
                self.submit(self._held, index, chunk)
            self._seen[root] = len(chunks)

    def submit(self, held: HeldState, index: PatchIndex | None, chunk: Chunk) -> None:
        """Decode a chunk soon."""
        if id(chunk) in self._decoded:
            return
        tables = b"" if index is None else index.shared_tables
        old = bits_in(held.flat, chunk.header)
        self._decoded[id(chunk)] = (
            chunk,
            self._threads.submit(decode_change, chunk, old, tables),
        )

    def decode(self, chunk: Chunk, old: np.ndarray, tables: bytes = b"") -> Change | None:
        """Return what a chunk changes: see `decode_change`."""
        found = self._decoded.get(id(chunk))
        return decode_change(chunk, old, tables) if found is None else found[1].result()

    def clear(self) -> None:
        """Forget all; what is held may change from now on."""
        for _, decoded in self._decoded.values():
            decoded.cancel()
        self._decoded = {}
        self._held = self._incoming = None

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(cancel_futures=True)
