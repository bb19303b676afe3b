"""ObjectLane: pulls versions from the folders that an ObjectWriter fills.

The reader plans for itself: manifests tell which patches there are, and those of the way of the
fewest bytes are read, some neighbouring chunks at a time. What a manifest says is checked as what
any source says is: only the roots that the run registered count.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from astraflow.codec.chunks import Chunk, chunk_invalid
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Layout
from astraflow.core.versions import PatchInfo, VersionInfo
from astraflow.rpc.channel import MAX_MESSAGE_NBYTES
from astraflow.rpc.concurrency import in_own_thread
from astraflow.storage.buckets import Bucket
from astraflow.transport.frames import source_late, source_lost
from astraflow.weights.patches.layouts import WHOLE
from astraflow.weights.patches.routes import READABLE, cheapest_way, steps
from astraflow.weights.publish.object_store import layout_name, manifest_name, patch_name
from astraflow.weights.publish.publisher import combined
from astraflow.wire.signatures import require_signed
from astraflow.wire.transfers import TransferPlan, TransferSpec
from astraflow.wire.versions import PatchObject, VersionManifest, read_manifest
from astraflow.wire.weights import SentChunk, decode_layout, digest_of
from astraflow_proto.weights.v1 import layout_pb2

Result = TypeVar("Result")

# A request to a bucket takes 20 to 100 ms: so much is read by one, and so many run at once.
_BLOCK_NBYTES: Final = 8 << 20
_AT_ONCE: Final = 4
# Of a store that hangs, calls that were given up count as long as they hang.
_MOST_CALLS: Final = 16
# Digests and headers of 2 TB in chunks of 4 MiB.
_MAX_MANIFEST_NBYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Neighbouring chunks of one patch.

    Attributes:
        name: Of the patch's object, from the policy's folder.
        first: Byte of the object that it begins with.
        end: The byte behind its last one.
    """

    patch_index: int
    name: str
    first: int
    end: int
    patch: PatchObject
    indexes: range

    def cut(self, content: bytes) -> Iterator[SentChunk]:
        at, view = 0, memoryview(content)
        for header in self.patch.headers[self.indexes.start : self.indexes.stop]:
            payload = view[at : at + header.payload_nbytes]
            at += header.payload_nbytes
            yield SentChunk(
                patch_index=self.patch_index, chunk=Chunk(header=header, payload=payload)
            )


class _Calls:
    """Makes calls that block, so many at once at most."""

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)

    async def make(self, call: Callable[[], Result]) -> Result:
        await self._free.acquire()
        loop = asyncio.get_running_loop()

        def work() -> Result:
            try:
                return call()
            finally:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._free.release)

        try:
            answer = in_own_thread(work, name="astraflow-store")
        except RuntimeError:
            # There are too many threads.
            self._free.release()
            raise
        return await answer


class ObjectLane:
    """Pulls from object stores; addresses are the URIs of versions' folders."""

    def __init__(self, *, stall_timeout_s: float = 30.0) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._buckets: dict[str, Bucket] = {}
        self._calls = _Calls(_MOST_CALLS)

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield the plan, then its chunks.

        Raises:
            AstraflowError: VERSION_EVICTED when the version, or a way to it, is not there (any
                more); SOURCE_UNREACHABLE, SOURCE_TIMEOUT; CHUNK_INVALID for what cannot be;
                CAPABILITY_MISSING when the package for the store is not installed.
        """
        del transfer_token
        bucket, patches = await self._plan(endpoint, spec)
        blocks = [*_blocks(patches, spec)]
        yield TransferPlan(
            patches=tuple(patch.index for patch in patches),
            chunk_count=sum(len(block.indexes) for block in blocks),
            payload_nbytes=sum(block.end - block.first for block in blocks),
        )
        waiting = deque(blocks)
        running: deque[asyncio.Task[list[SentChunk]]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < _AT_ONCE:
                    running.append(asyncio.create_task(self._read(bucket, waiting.popleft())))
                for sent in await running[0]:
                    yield sent
                running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        del transfer_token
        bucket, _ = self._opened(endpoint)
        try:
            read = partial(bucket.read, layout_name(digest), 0, MAX_MESSAGE_NBYTES)
            content = await self._patiently(read)
            return decode_layout(layout_pb2.Layout.FromString(content))
        except FileNotFoundError:
            raise AstraflowError(
                Reason.LAYOUT_UNKNOWN, f"{bucket.url} has another layout, or none"
            ) from None
        except DecodeError as error:
            raise chunk_invalid(f"the layout in {bucket.url} is none: {error}") from error

    async def close(self) -> None:
        self._buckets.clear()

    async def _plan(self, uri: str, spec: TransferSpec) -> tuple[Bucket, list[PatchObject]]:
        """Return the patches of the way of the fewest bytes, in order."""
        bucket, version = self._opened(uri)
        if version != str(spec.version):
            raise AstraflowError(
                Reason.VERSION_UNKNOWN, f"{uri} is not the folder of version {spec.version}"
            )
        newest = await self._manifests(bucket, spec.version)

        def missing_nbytes(info: PatchInfo) -> float:
            had = spec.had(info.root_digest)
            count = 0 if had is None else sum(map(len, had.indexes)) or info.chunk_count
            return info.payload_nbytes * (1 - count / max(info.chunk_count, 1))

        reachable = chain.from_iterable(manifest.reachable for manifest in newest)
        readable = steps(p for p in reachable if (p.profile, p.codec_version) in READABLE)
        found = cheapest_way(readable, spec.base_version, spec.version, missing_nbytes)
        if found is None:
            raise AstraflowError(
                Reason.VERSION_EVICTED,
                f"the object store has no way from {spec.base_version} to version {spec.version}",
            )
        way, manifests = found[1], {spec.version: newest}
        for info in way:
            if info.version not in manifests:
                manifests[info.version] = await self._manifests(bucket, info.version)
        return bucket, [_found(manifests[info.version], info) for info in way]

    async def _manifests(self, bucket: Bucket, version: int) -> list[VersionManifest]:
        names = await self._patiently(partial(_manifest_names, bucket, str(version)))
        return [await self._patiently(partial(_manifest, bucket, name)) for name in names]

    async def _read(self, bucket: Bucket, block: _Block) -> list[SentChunk]:
        try:
            content = await self._patiently(
                partial(bucket.read, block.name, block.first, block.end)
                if block.end > block.first
                else bytes
            )
        except FileNotFoundError:
            raise AstraflowError(
                Reason.VERSION_EVICTED, f"{bucket.url}/{block.name} is no longer there"
            ) from None
        if len(content) != block.end - block.first:
            raise source_lost(f"{bucket.url}/{block.name} is cut off")
        return [*block.cut(content)]

    async def _patiently(self, read: Callable[[], Result]) -> Result:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                return await self._calls.make(read)
        except TimeoutError:
            why = f"the object store has not answered for {self._stall_timeout_s:g} s"
            raise source_late(why) from None

    def _opened(self, uri: str) -> tuple[Bucket, str]:
        """Return the bucket of a policy and the version that a URI names."""
        folder, _, version = uri.rstrip("/").rpartition("/")
        if folder not in self._buckets:
            self._buckets[folder] = Bucket(folder)
        return self._buckets[folder], version


def _found(manifests: Sequence[VersionManifest], info: PatchInfo) -> PatchObject:
    for patch in chain.from_iterable(manifest.patches for manifest in manifests):
        if patch.index.patch == info:
            return patch
    raise AstraflowError(
        Reason.VERSION_EVICTED, f"a patch to version {info.version} is no longer in the store"
    )


def _manifest_names(bucket: Bucket, version: str) -> list[str]:
    """Return the objects of a version's manifests: one, or one of every rank."""
    whole = manifest_name(WHOLE)
    ranks = [name for name in bucket.names(version) if name.startswith(f"{whole}-")]
    return [f"{version}/{name}" for name in ranks or [whole]]


def _manifest(bucket: Bucket, name: str) -> VersionManifest:
    try:
        return read_manifest(bucket.read(name, 0, _MAX_MANIFEST_NBYTES))
    except FileNotFoundError:
        raise AstraflowError(
            Reason.VERSION_EVICTED, f"{bucket.url} has no {name}, or no longer"
        ) from None
    except AstraflowError as error:
        if error.reason is not Reason.INVALID_FIELD:
            raise
        raise chunk_invalid(f"{bucket.url}/{name} cannot be: {error.message}") from error


def _blocks(patches: Sequence[PatchObject], spec: TransferSpec) -> Iterator[_Block]:
    """Cut what is wanted into neighbours of 8 MiB at most, in order."""
    for number, patch in enumerate(patches):
        info, offsets = patch.index.patch, patch.offsets()
        for run in _runs(spec.wanted(info.root_digest, info.chunk_count), offsets):
            yield _Block(
                patch_index=number,
                name=f"{info.version}/{patch_name(info)}",
                first=offsets[run.start],
                end=offsets[run.stop],
                patch=patch,
                indexes=run,
            )


def _runs(indexes: Sequence[int], offsets: Sequence[int]) -> Iterator[range]:
    first = 0
    for at in range(1, len(indexes) + 1):
        if at < len(indexes):
            is_next = indexes[at] == indexes[at - 1] + 1
            nbytes = offsets[indexes[at] + 1] - offsets[indexes[first]]
            if is_next and nbytes <= _BLOCK_NBYTES:
                continue
        yield range(indexes[first], indexes[at - 1] + 1)
        first = at


def stored_version(uri: str, signing_key: bytes) -> VersionInfo:
    """Return a version that lies in an object store, once all of it was verified without the hub.

    Signatures, roots and every byte of its patches are read. What they lead from is not.

    Args:
        uri: Of the version's folder.
        signing_key: Of its policy in its run, as the run shows it.

    Raises:
        AstraflowError: SIGNATURE_INVALID for what no trainer of the run registered;
            DIGEST_MISMATCH, CHUNK_INVALID for other bytes; VERSION_EVICTED when a part is missing;
            what `Bucket` raises.
    """
    folder, _, version = uri.rstrip("/").rpartition("/")
    bucket = Bucket(folder)
    infos: list[VersionInfo] = []
    try:
        for name in _manifest_names(bucket, version):
            manifest = _manifest(bucket, name)
            trusted = replace(manifest.version, signing_key=signing_key)
            for patch in manifest.patches:
                require_signed(trusted, patch.index.patch)
                _require_whole(patch, bucket.read(f"{version}/{patch_name(patch.index.patch)}"))
            patches = tuple(patch.index.patch for patch in manifest.patches)
            infos.append(replace(trusted, patches=patches))
    except (FileNotFoundError, AstraflowError) as error:
        is_gone = isinstance(error, FileNotFoundError)
        reason = Reason.VERSION_EVICTED if is_gone else error.reason
        raise AstraflowError(reason, f"{uri}: {error}") from error
    if not any(info.patches for info in infos):
        raise AstraflowError(Reason.VERSION_EVICTED, f"{uri} has no version")
    return combined(infos)


def _require_whole(patch: PatchObject, content: bytes) -> None:
    info = patch.index.patch
    if patch.index.root_digest != info.root_digest or len(content) != info.payload_nbytes:
        raise AstraflowError(Reason.DIGEST_MISMATCH, f"{patch_name(info)} is not what was signed")
    whole = range(info.chunk_count)
    block = _Block(patch_index=0, name="", first=0, end=len(content), patch=patch, indexes=whole)
    for number, sent in enumerate(block.cut(content)):
        if digest_of(sent.chunk) != patch.index.chunk_digests[number]:
            raise AstraflowError(
                Reason.DIGEST_MISMATCH, f"chunk {number} of {patch_name(info)} has other bytes"
            )
