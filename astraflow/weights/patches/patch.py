"""Patches: their names, and how they grow, chunk by chunk as they are encoded or pulled.

A chunk that is not kept is made again from the versions that its patch leads between.
"""

import asyncio
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import BinaryIO, Final, Self

from google.protobuf.message import DecodeError

from astraflow.codec.chunks import CODEC_VERSION, Chunk, ChunkHeader, chunk_invalid
from astraflow.codec.encode import encode_chunk, encode_patch
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import CodecProfile, PatchInfo
from astraflow.rpc.channel import MAX_MESSAGE_NBYTES
from astraflow.transport.grpc_lane import decode_response, encode_response
from astraflow.weights.patches.history import History, Sign
from astraflow.weights.patches.layouts import WHOLE, Shard
from astraflow.weights.patches.routes import cheapest_way
from astraflow.wire.transfers import ChunkSet, SentItem, TransferPlan
from astraflow.wire.weights import PatchIndex, digest_of, root_digest
from astraflow_proto.weights.v1.transfer_service_pb2 import PullResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchName:
    """What a patch is, before its bytes are known."""

    version: int
    base_version: int | None
    profile: CodecProfile = CodecProfile.FAST
    shard: Shard = WHOLE

    @classmethod
    def of(cls, info: PatchInfo) -> Self:
        shard = Shard(rank=info.shard_rank, count=info.shard_count)
        return cls(
            version=info.version, base_version=info.base_version, profile=info.profile, shard=shard
        )


class Patch:
    """A patch that grows: one thread or event loop adds to it, any event loop reads.

    An encoder adds chunks in order and finishes it, which makes the index; a pull knows the index
    and adds chunks as they come. Readers look when they have time, so nobody who is slow holds up
    who adds.

    Attributes:
        chunks: Those that are here, by index.
        info: Once its index is known; before, to read it is an AttributeError.
        failure: Why nothing of it can be had; None: nothing is wrong.
        is_over: Whether who encodes it adds no more.
    """

    info: PatchInfo

    def __init__(
        self, index: PatchIndex | None = None, chunks: dict[int, Chunk] | None = None
    ) -> None:
        self.chunks: dict[int, Chunk] = {} if chunks is None else chunks
        self.failure: AstraflowError | None = None
        self.is_over = False
        self._index = index
        if index is not None:
            self.info = index.patch
        self._left_out: dict[int, ChunkHeader] = {}
        self._lock = Lock()
        self._readers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @classmethod
    def of(
        cls,
        name: PatchName,
        chunks: Iterable[Chunk],
        *,
        tables: bytes = b"",
        is_kept: bool = True,
        sign: Sign,
    ) -> Self:
        """Return a patch of chunks, by index; where it is not kept, of their headers alone."""
        patch, digests, nbytes = cls(), list[bytes](), 0
        for chunk in chunks:
            digests.append(digest_of(chunk))
            nbytes += chunk.header.payload_nbytes
            if is_kept:
                patch.add(chunk)
            else:
                patch._left_out[chunk.header.index] = chunk.header
        patch.finish(index_of(name, digests, nbytes, tables, sign=sign))
        return patch

    @property
    def is_finished(self) -> bool:
        """Whether its index is known; chunks may still be on their way."""
        return self._index is not None

    @property
    def index(self) -> PatchIndex:
        if self._index is None:
            raise AssertionError("the patch is still being encoded")
        return self._index

    @property
    def root(self) -> bytes:
        return self.info.root_digest

    @property
    def headers(self) -> tuple[ChunkHeader, ...]:
        """Of all chunks, by index; the patch has to be complete."""
        known = {**self._left_out, **{n: each.header for n, each in self.chunks.items()}}
        return tuple(known[number] for number in range(self.info.chunk_count))

    def in_order(self) -> tuple[Chunk, ...]:
        """Return its chunks by index; all of them have to be here."""
        return tuple(self.chunks[number] for number in range(self.info.chunk_count))

    @property
    def is_kept(self) -> bool:
        """Whether its chunks are here, or will be; else they are made again."""
        return not self._left_out

    @property
    def is_complete(self) -> bool:
        return self.is_finished and len(self.chunks) == self.info.chunk_count

    def add(self, chunk: Chunk) -> None:
        """Add a chunk; while it is encoded, the next one."""
        self.chunks[chunk.header.index] = chunk
        self._notify()

    def finish(self, index: PatchIndex) -> None:
        self.info = index.patch
        self._index = index
        self._notify()

    def fail(self, error: AstraflowError) -> None:
        """Say that nothing of it can be had any more."""
        self.failure = self.failure or error
        self.end()

    def end(self) -> None:
        self.is_over = True
        self._notify()

    async def ended(self) -> None:
        await self._until(lambda: self.is_over)

    async def chunk(self, index: int) -> Chunk:
        await self._until(lambda: self.failure is not None or index in self.chunks)
        if self.failure is not None:
            raise self.failure
        return self.chunks[index]

    async def _until(self, is_so: Callable[[], bool]) -> None:
        if is_so():
            return
        with self.reading() as news:
            while not is_so():
                await news.wait()
                news.clear()

    @contextmanager
    def reading(self) -> Generator[asyncio.Event]:
        """Give an event that is set whenever there is more to see."""
        news = asyncio.Event()
        with self._lock:
            self._readers[news] = asyncio.get_running_loop()
        try:
            yield news
        finally:
            with self._lock:
                del self._readers[news]

    def is_sound(self) -> bool:
        """Whether the payloads that are here are what their digests say; reads all of them."""
        return all(map(self.has, self.chunks.values()))

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk is one of its own, by the digest."""
        digests, number = self.index.chunk_digests, chunk.header.index
        return number < len(digests) and digest_of(chunk) == digests[number]

    def payload_nbytes(self, indexes: Sequence[int]) -> int:
        """Return what some chunks have; where one is on its way, what all of them have."""
        found = [self._header(index) for index in indexes]
        known = [each.payload_nbytes for each in found if each is not None]
        return sum(known) if len(known) == len(found) else self.info.payload_nbytes

    def missing_nbytes(self, have: ChunkSet) -> int:
        return sum(h.payload_nbytes for n, h in enumerate(self.headers) if n not in have)

    def _header(self, index: int) -> ChunkHeader | None:
        chunk = self.chunks.get(index)
        return self._left_out.get(index) if chunk is None else chunk.header

    def _notify(self) -> None:
        # A reader looks at what is here once it is registered.
        if not self._readers:
            return
        with self._lock:
            readers = [*self._readers.items()]
        for news, loop in readers:
            with suppress(RuntimeError):  # The loop was closed with all its readers.
                loop.call_soon_threadsafe(news.set)


def index_of(
    name: PatchName,
    digests: Sequence[bytes],
    payload_nbytes: int,
    tables: bytes = b"",
    *,
    sign: Sign,
) -> PatchIndex:
    info = PatchInfo(
        base_version=name.base_version,
        version=name.version,
        profile=name.profile,
        codec_version=CODEC_VERSION,
        root_digest=root_digest(digests, tables),
        chunk_count=len(digests),
        payload_nbytes=payload_nbytes,
        shard_rank=name.shard.rank,
        shard_count=name.shard.count,
    )
    return PatchIndex(patch=sign(info), chunk_digests=tuple(digests), shared_tables=tables)


def plan_of(patches: Sequence[Patch]) -> TransferPlan:
    """Return the plan of all chunks of some patches."""
    infos = [patch.info for patch in patches]
    return TransferPlan(
        patches=tuple(patch.index for patch in patches),
        chunk_count=sum(info.chunk_count for info in infos),
        payload_nbytes=sum(info.payload_nbytes for info in infos),
    )


def packed(item: SentItem) -> bytes:
    """Return an item as it lies among others in a file or a frame: its length before it, u32."""
    content = encode_response(item).SerializeToString()
    return _LENGTH.pack(len(content)) + content


def unpacked(file: BinaryIO) -> Iterator[SentItem]:
    """Yield items that were packed one behind the other.

    Raises:
        AstraflowError: CHUNK_INVALID where one is torn, or none.
    """
    while length := file.read(_LENGTH.size):
        try:
            nbytes = min(_LENGTH.unpack(length)[0], MAX_MESSAGE_NBYTES)
            content = file.read(nbytes)
            message = PullResponse.FromString(content)
        except (struct.error, DecodeError) as error:
            raise chunk_invalid("an item is torn") from error
        yield decode_response(message if len(content) == nbytes else None)


_LENGTH: Final = struct.Struct("<I")

Way = tuple[Patch, ...]
"""Patches that are applied one after the other."""


def cheapest_patches(
    patches: Iterable[Patch], base: int | None, version: int, cost: Callable[[Patch], float]
) -> tuple[float, Way] | None:
    """Return the cheapest way by patches of one shard, and its cost; see `cheapest_way`."""
    known = {
        info: each
        for each in patches
        if (info := each.info).version <= version and (base is None or base < info.version)
    }
    alone = ((info,) for info in sorted(known, key=lambda each: each.version))
    found = cheapest_way(alone, base, version, lambda info: cost(known[info]))
    return found and (found[0], tuple(known[info] for info in found[1]))


# Nobody asks for the digest of a state that a history has already: what counts are changes.
_UNUSED: Final = StateDigest()


def make_patch(
    history: History,
    base: int | None,
    version: int,
    *,
    profile: CodecProfile = CodecProfile.FAST,
    is_kept: bool = False,
) -> Patch:
    """Return ONE patch over several versions, or from nothing, range by range.

    An element that changed twice is in it once, and one that changed back is not. Payloads that are
    not kept are made again when they are asked for.

    Raises:
        AstraflowError: VERSION_EVICTED when the history no longer reaches one of the versions.
    """
    part, bits, tables = history.shard_layout, history.bits_of(version), b""
    if base is None:
        whole = (encode_chunk(where, bits(where), None, profile=profile) for where in part.ranges())
        chunks = (replace(c, header=replace(c.header, index=n)) for n, c in enumerate(whole))
    else:
        encoded = encode_patch(part, bits, history.bits_of(base), _UNUSED, profile=profile)
        chunks, tables = encoded.chunks, encoded.shared_tables
    name = PatchName(version=version, base_version=base, profile=profile, shard=part.shard)
    return Patch.of(name, chunks, tables=tables, is_kept=is_kept, sign=history.sign)


def evicted(version: int, base_version: int | None, why: str) -> AstraflowError:
    start = "nothing" if base_version is None else f"version {base_version}"
    return AstraflowError(
        Reason.VERSION_EVICTED,
        f"what leads from {start} to version {version} {why}",
        metadata={"version": str(version), "base_version": str(base_version)},
    )
