"""The history of a part: its newest version, flat, and what leads back to the versions before.

A sparse chunk leads back as well as forward, so the patches that are kept for readers are what
undoes them. Only where a range came whole its old bits are kept too, as a compressed difference.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np
import zstandard

from astraflow.codec.chunks import Chunk, ChunkRange, Encoding
from astraflow.codec.decode import decode_back, decode_change, decode_whole
from astraflow.codec.encode import RangeBits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import PatchInfo
from astraflow.weights.patches.layouts import ShardLayout

Sign = Callable[[PatchInfo], PatchInfo]
"""Returns a patch with its signature."""


_Step = tuple[int, Chunk | bytes]
"""How a range became what it is in a version: a sparse chunk, or what it differs by, packed."""


class History:
    """The last versions of a part, any range of any of them; one thread writes, many read.

    A reader holds the lock for one range, the writer for the changes of one range. So neither
    waits for long, and the writer never for a reader's network. A version counts as soon as it is
    entered; what it changes is written later, range by range.

    Attributes:
        newest: The version that was entered last; None: none.
        oldest: The oldest version that can be read; None: none.
        lasting: The oldest that can be read until the next one comes, whoever reads; None: none.
        sign: Signs, where the publisher has a key.
    """

    def __init__(self, shard_layout: ShardLayout) -> None:
        self.shard_layout = shard_layout
        self.newest: int | None = None
        self.oldest: int | None = None
        self.lasting: int | None = None
        self.sign: Sign = lambda patch: patch
        self._flat = np.zeros(shard_layout.nbytes, np.uint8)
        self._steps: dict[int, list[_Step]] = {where.offset: [] for where in shard_layout.ranges()}
        # Entered and not yet written into the flat bits, by offset.
        self._late: dict[int, Chunk] = {}
        self._sizes: Counter[int] = Counter()
        self._readers: Counter[int] = Counter()
        self._lock = Lock()

    def start(self, version: int, target: RangeBits) -> StateDigest:
        """Copy a version; the ones before are forgotten. Return its share of the state digest."""
        with self._lock:
            self.oldest = version
            self._late.clear()
            self._sizes.clear()
            self._steps = {where.offset: [] for where in self.shard_layout.ranges()}
        for where in self.shard_layout.ranges():
            bits = target(where)
            with self._lock:
                self._view(where)[:] = bits
        self.newest = version
        return self.digest()

    def digest(self) -> StateDigest:
        """Return what the bits of the newest version contribute to the state digest.

        It means nothing when the next version is entered meanwhile.
        """
        self.flush()
        if self.shard_layout.shard.count == 1:
            return StateDigest.of(self.shard_layout.layout, self._flat)
        ranges = self.shard_layout.ranges()
        return StateDigest.of_pieces((each, self.newest_bits(each)) for each in ranges)

    def advance(self, version: int, chunks: Sequence[Chunk]) -> None:
        """Enter the next version: the chunks that lead to it from the newest, made here.

        What is sparse is written when its range is read, or by `flush`.
        """
        self.flush()
        for chunk in chunks:
            if chunk.header.encoding is Encoding.SPARSE_FAST:
                with self._lock:
                    self._late[chunk.header.offset] = chunk
                    self._steps[chunk.header.offset].append((version, chunk))
                self._sizes[version] += len(chunk.payload)
            elif chunk.header.encoding is not Encoding.UNCHANGED:
                self._replace(version, chunk)
        self.newest = version

    def flush(self) -> None:
        """Write what was entered: the work that nobody who waits for a version waits for."""
        while True:
            with self._lock:
                if not self._late:
                    return
                self._write(next(iter(self._late)))

    def newest_bits(self, where: ChunkRange) -> np.ndarray:
        """Return a range of the newest version, as a view: for who enters versions."""
        with self._lock:
            # Another thread that is at this range holds the lock until all of it is written.
            self._write(where.offset)
        return self._view(where)

    def bits_of(self, version: int) -> RangeBits:
        """Return what reads a version; each range that it gives is a copy.

        Raises:
            AstraflowError: VERSION_EVICTED, also while it is read, when nothing leads back to it.
        """
        return lambda where: self._read(version, where)

    @contextmanager
    def reading(self, versions: Sequence[int]) -> Generator[None]:
        with self._lock:
            self._readers.update(versions)
        try:
            yield
        finally:
            with self._lock:
                self._readers.subtract(versions)
                self._readers += Counter[int]()

    def forget(self, *, keep: int, room_nbytes: int) -> None:
        """Forget versions that are too old, or whose undoing takes more than there is room for.

        What readers are at may take as much again.
        """
        if self.newest is None or self.oldest is None:
            return
        with self._lock:
            oldest = max(self.oldest, self._affordable(self.newest - keep, room_nbytes))
            self.lasting = oldest
            read = [each for each in self._readers if self.oldest <= each < oldest]
            if read:
                oldest = self._affordable(min(read), 2 * room_nbytes)
            self.oldest = oldest = max(self.oldest, oldest)
            for offset, steps in self._steps.items():
                if steps and steps[0][0] <= oldest:
                    self._steps[offset] = [step for step in steps if step[0] > oldest]
            for version in [each for each in self._sizes if each <= oldest]:
                del self._sizes[version]

    def _affordable(self, oldest: int, room_nbytes: int) -> int:
        """Return the oldest version, not before the given one, for which there is room."""
        for version in sorted(self._sizes, reverse=True):
            room_nbytes -= self._sizes[version]
            if room_nbytes < 0:
                return max(oldest, version)
        return oldest

    def _view(self, where: ChunkRange) -> np.ndarray:
        return self._flat[self.shard_layout.place(where)].view(where.dtype.bits)

    def _replace(self, version: int, chunk: Chunk) -> None:
        where, new = chunk.header, decode_whole(chunk)
        bits = self._view(where)
        packer = zstandard.ZstdCompressor(level=1, write_content_size=True)
        undo = packer.compress((bits ^ new).data)
        with self._lock:
            bits[:] = new
            self._steps[where.offset].append((version, undo))
        self._sizes[version] += len(undo)

    def _write(self, offset: int) -> None:
        """Write what was entered of a range, if that is still to be done; under the lock."""
        chunk = self._late.pop(offset, None)
        if chunk is None:
            return
        bits = self._view(chunk.header)
        change = decode_change(chunk, bits)
        if change is not None:
            bits[change.indices] = change.values

    def _read(self, version: int, where: ChunkRange) -> np.ndarray:
        with self._lock:
            if self.oldest is None or not self.oldest <= version:
                raise AstraflowError(
                    Reason.VERSION_EVICTED,
                    f"version {version} is no longer kept, the oldest is {self.oldest}",
                    metadata={"version": str(version)},
                )
            self._write(where.offset)
            bits = self._view(where).copy()
            steps = [undo for at, undo in self._steps[where.offset] if at > version]
        for undo in reversed(steps):
            if isinstance(undo, Chunk):
                indices, before = decode_back(undo, bits)
                bits[indices] = before
            else:
                differs = zstandard.ZstdDecompressor().decompress(undo)
                bits ^= np.frombuffer(differs, bits.dtype)
        return bits
