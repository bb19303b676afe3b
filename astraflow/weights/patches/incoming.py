"""The version that is pulled: its chunks verified one by one, from whichever source they come.

They are decoded over what is held while others of their patch are still on their way. What is
decoded counts only once the state that all of it makes is verified; see `state.stage`.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from itertools import groupby, islice
from time import perf_counter
from typing import Final

import numpy as np

from astraflow.codec.changes import Change
from astraflow.codec.chunks import CHUNK_NBYTES, Chunk, Compression, Encoding, chunk_invalid
from astraflow.codec.decode import decode_change
from astraflow.codec.encode import flat_bits
from astraflow.codec.rates import measured_rates
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import PatchInfo, VersionInfo
from astraflow.transport.frames import source_lost
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.patch import Patch
from astraflow.weights.patches.routes import READABLE, registered_bound, steps
from astraflow.weights.patches.state import GrowingState, HeldState
from astraflow.wire.signatures import require_signed
from astraflow.wire.transfers import ChunkSet, TransferPlan, TransferSpec
from astraflow.wire.weights import PatchIndex, SentChunk, digest_of

VerifiedChunks = dict[bytes, dict[int, Chunk]]
"""By root of the patch, by index."""


class IncomingVersion:
    """Collects the chunks of the patches that lead to a version.

    Chunks are kept by the root of their patch, so what one source sent before it failed need not
    be sent by the next one; nor again, when the next pull begins with what this one has left.

    Attributes:
        base_version: What is held; None: nothing.
        nbytes: Payload received and verified.
        chunk_count: Chunks received and verified.
        bad_chunk_count: Chunks and plans that were refused.
        verify_s: Seconds in which digests were compared.
        planned: The patches of the plan, which grow by verified chunks; none before there is one.
        chunks: Those that are here, verified.
    """

    def __init__(
        self,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
        *,
        base_version: int | None,
        leftover: VerifiedChunks | None = None,
    ) -> None:
        self.target = target
        self.base_version = base_version
        self.nbytes = self.chunk_count = self.bad_chunk_count = 0
        self.verify_s = 0.0
        self._known = known
        self.planned: tuple[Patch, ...] = ()
        self._patches: dict[PatchInfo, Patch] = {}
        self.chunks: VerifiedChunks = leftover or {}

    @property
    def left_nbytes(self) -> int | None:
        """Payload of the plan that is not here, chunks counted as equal; None: no plan yet."""
        if not self.planned:
            return None
        return sum(
            round(info.payload_nbytes * (1 - len(patch.chunks) / max(1, info.chunk_count)))
            for patch in self.planned
            for info in [patch.info]
        )

    def spec(
        self, *, want: Sequence[tuple[bytes, int]] = (), goodput_bytes_per_s: float = 0.0
    ) -> TransferSpec:
        wanted: dict[bytes, list[int]] = {}
        for root, number in want:
            wanted.setdefault(root, []).append(number)
        have = [ChunkSet.of(root, chunks) for root, chunks in self.chunks.items() if chunks]
        bound = registered_bound(self._known, self.base_version, self.target.version)
        if bound is not None and want:
            wanted_nbytes = min(bound.payload_nbytes, len(want) * CHUNK_NBYTES)
            bound = replace(bound, chunk_count=len(want), payload_nbytes=wanted_nbytes)
        return TransferSpec(
            policy_id=self.target.policy_id,
            version=self.target.version,
            base_version=self.base_version,
            layout_digest=self.target.layout_digest,
            goodput_bytes_per_s=goodput_bytes_per_s,
            core_count=_DECODING_THREADS,
            decode_rates=tuple(measured_rates().decode.values()),
            want_chunks=tuple(ChunkSet.of(root, each) for root, each in wanted.items()),
            have_chunks=tuple(have),
            bound=bound,
        )

    @property
    def is_complete(self) -> bool:
        return bool(self.planned) and all(patch.is_complete for patch in self.planned)

    def missing(self) -> list[tuple[bytes, int]]:
        """Return root and index of every chunk of the plan that is not here, in order."""
        return [
            (patch.root, number)
            for patch in self.planned
            for number in range(patch.info.chunk_count)
            if number not in patch.chunks
        ]

    def is_planned_as(self, plan: TransferPlan) -> bool:
        infos = [self._signed(each).patch for each in plan.patches]
        return infos == [each.info for each in self.planned]

    def begin(self) -> None:
        """Forget the plan, not the chunks: another source makes its own."""
        self.planned = ()

    def fail(self, error: AstraflowError) -> None:
        """Say to who passes on what is not complete that no more of it comes."""
        for patch in self._patches.values():
            if not patch.is_complete:
                patch.fail(error)

    def take(
        self, item: TransferPlan | SentChunk, frame: ShardLayout, *, is_stored: bool = False
    ) -> None:
        """Take the plan or a chunk of it.

        What is stored comes from where anybody could have put it: then the patches of a version
        with a signing key must be signed. Members of a release without signatures leave them out;
        what they send is compared with what the run told.

        Raises:
            AstraflowError: DIGEST_MISMATCH, CHUNK_INVALID, SIGNATURE_INVALID: the source lies or
                is broken; PATCH_UNKNOWN: the run has not told of a patch in the plan, or this
                release cannot read it.
        """
        if isinstance(item, TransferPlan):
            try:
                self._take_plan(item, is_stored=is_stored)
            except AstraflowError as error:
                # No honest source makes a plan that contradicts itself or what it was asked for.
                self.bad_chunk_count += error.reason is not Reason.PATCH_UNKNOWN
                raise
        else:
            self._take_chunk(item, frame)

    def require_complete(self) -> None:
        if not self.planned:
            raise AstraflowError(Reason.SOURCE_UNREACHABLE, "the source ended without a plan")
        for patch in self.planned:
            missing = patch.info.chunk_count - len(patch.chunks)
            if missing:
                raise source_lost(
                    f"the source ended {missing} chunks before the end of version"
                    f" {patch.info.version}"
                )

    def _take_plan(self, plan: TransferPlan, *, is_stored: bool) -> None:
        if self.planned:
            raise chunk_invalid("a transfer has one plan, not two")
        indexes = plan.patches
        if not is_stored:
            indexes = tuple(map(self._signed, indexes))
        for index in indexes:
            self._require_registered(index)
        self._require_way([index.patch for index in indexes])
        before, self._patches = self._patches, {}
        # Chunks of patches that are not in the plan would never be used up.
        here, self.chunks = self.chunks, {}
        for index in indexes:
            root = index.patch.root_digest
            chunks = here.get(root)
            if chunks is not None and root in self.chunks:
                # Steps that change the same have one root; each is decoded over its own base.
                chunks = {number: copy(chunk) for number, chunk in chunks.items()}
            patch = before.pop(index.patch, None) or Patch(index, chunks)
            self._patches[index.patch] = patch
            self.chunks.setdefault(root, patch.chunks)
        self.planned = tuple(self._patches.values())
        another = "what led there comes another way now; ask for it again"
        for patch in before.values():
            if not patch.is_complete:
                patch.fail(AstraflowError(Reason.VERSION_EVICTED, another))

    def _require_way(self, infos: Sequence[PatchInfo]) -> None:
        """Check that patches lead from the base to the target, each with all its shards, once."""
        at = self.base_version
        for version, shards in groupby(infos, key=lambda each: each.version):
            together = [*shards]
            if [*map(len, steps(together))] != [len(together)]:
                raise chunk_invalid(f"the plan lacks a shard of version {version}, or has two")
            base = together[0].base_version
            if base != at:
                raise chunk_invalid(f"a patch starts from {base}, not from {at}")
            at = version
        if at != self.target.version or not infos:
            raise chunk_invalid(f"the plan leads to {at}, not {self.target.version}")

    def is_registered(self, plan: TransferPlan) -> bool:
        return all(self._is_known(self._signed(index)) for index in plan.patches)

    def learn(self, infos: Iterable[VersionInfo]) -> None:
        """Take note of versions that the run has told again: some have gained patches."""
        self._known = {**self._known, **{info.version: info for info in infos}}

    def _is_known(self, index: PatchIndex) -> bool:
        info = self._known.get(index.patch.version)
        return info is not None and index.patch in info.patches

    def _signed(self, index: PatchIndex) -> PatchIndex:
        """Return a patch with the signature that it was registered with, if it has none."""
        info = self._known.get(index.patch.version)
        if index.patch.signature or info is None or not info.signing_key:
            return index
        for patch in info.patches:
            if replace(patch, signature=b"") == index.patch:
                return replace(index, patch=patch)
        return index

    def _require_registered(self, index: PatchIndex) -> None:
        patch = index.patch
        info = self._known.get(patch.version)
        if info is not None:
            require_signed(info, patch)
        if not self._is_known(index) or (patch.profile, patch.codec_version) not in READABLE:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN,
                f"the patch to version {patch.version} is none that the run told of and"
                " this release can read",
            )
        if index.root_digest != patch.root_digest:
            raise AstraflowError(
                Reason.DIGEST_MISMATCH, "the chunk digests do not add up to the registered root"
            )

    def _take_chunk(self, sent: SentChunk, frame: ShardLayout) -> None:
        header, started = sent.chunk.header, perf_counter()
        try:
            patch = self._verified_patch(sent)
        except AstraflowError:
            self.bad_chunk_count += 1
            raise
        finally:
            self.verify_s += perf_counter() - started
        frame.check(header)
        if header.index not in patch.chunks:
            patch.add(sent.chunk)
            self.chunk_count += 1
            self.nbytes += len(sent.chunk.payload)

    def _verified_patch(self, sent: SentChunk) -> Patch:
        """Return the patch that a chunk is surely of."""
        number = sent.chunk.header.index
        if not sent.patch_index < len(self.planned):
            raise chunk_invalid("a chunk of no patch of the plan")
        patch = self.planned[sent.patch_index]
        if not number < patch.info.chunk_count:
            raise chunk_invalid(f"the patch has no chunk {number}")
        if digest_of(sent.chunk) != patch.index.chunk_digests[number]:
            raise AstraflowError(
                Reason.DIGEST_MISMATCH,
                f"chunk {number} of version {patch.info.version} has other bytes than registered",
            )
        return patch


# Sources weigh what a smaller patch saves against what it takes these to decode it.
_DECODING_THREADS: Final = 1

_Decoded = tuple[Chunk, Future[Change | None]]


class PipelinedDecoder:
    """Decodes verified chunks while others are on their way.

    Those of patches that start from what is held are decoded in a thread; `decode` takes the place
    of `decode_change`. Those of a patch from nothing become the state at once, and their payloads
    are let go, so that a model that is pulled is not in memory twice. It listens to a pull as the
    last one. What is held must stay as it is from `over` to `clear`. With `keeps_payloads` somebody
    passes chunks on after they have come: those that are not the state's own bytes are not let go.

    Attributes:
        growing: What has come from nothing; None: nothing. It outlives a pull that fails, because
            the next one goes on with its chunks.
    """

    def __init__(self, *, keeps_payloads: bool = False) -> None:
        self.growing: GrowingState | None = None
        self._keeps_payloads = keeps_payloads
        self._threads = ThreadPoolExecutor(_DECODING_THREADS, thread_name_prefix="astraflow-decode")
        self._held: HeldState | None = None
        self._incoming: IncomingVersion | None = None
        # By the chunk's identity, which lives as long as the entry.
        self._decoded: dict[int, _Decoded] = {}
        self._seen: dict[bytes, int] = {}

    def over(self, held: HeldState | None) -> None:
        """Take note of what the next patches start from; None: nothing, and all is left alone."""
        self.clear()
        self._held = held

    def begin(self, incoming: IncomingVersion, frame: ShardLayout) -> None:
        growing = self.growing
        if self._held is not None:
            growing = None
        elif growing is None or growing.frame.digest != frame.digest:
            growing = GrowingState(frame)
        self.growing = growing
        filled = {} if growing is None else growing.filled
        # Of leftover chunks some have nothing but their decoded bits, which may be gone.
        for root, chunks in incoming.chunks.items():
            for number, chunk in [*chunks.items()]:
                is_whole = len(chunk.payload) == chunk.header.payload_nbytes
                if not is_whole and number not in filled.get(root, ()):
                    del chunks[number]
        self._incoming = incoming
        self._seen = {}

    def note(self) -> None:
        held, growing = self._held, self.growing
        planned = () if self._incoming is None else self._incoming.planned
        if (
            growing is not None
            and planned
            and not growing.filled.keys() <= {p.root for p in planned}
        ):
            # What was planned before is forgotten.
            growing = self.growing = GrowingState(growing.frame)
        for patch in planned:
            if patch.info.base_version != (None if held is None else held.version):
                return
            fresh = [*islice(patch.chunks.values(), self._seen.get(patch.root, 0), None)]
            self._seen[patch.root] = len(patch.chunks)
            for chunk in fresh:
                if held is not None:
                    old, tables = flat_bits(held.flat)(chunk.header), patch.index.shared_tables
                    decoding = self._threads.submit(decode_change, chunk, old, tables)
                    self._decoded[id(chunk)] = chunk, decoding
                elif growing is not None:
                    moved = self._moved(growing, patch.index, chunk)
                    patch.chunks[chunk.header.index] = moved

    def _moved(self, growing: GrowingState, index: PatchIndex, chunk: Chunk) -> Chunk:
        """Decode a chunk, and return it with the payload that the state has of it."""
        try:
            part = growing.fill(index, chunk)
        except AstraflowError:
            # Who stages the version finds it again, and says so.
            return chunk
        header = chunk.header
        if header.encoding is Encoding.DENSE and header.compression is Compression.NONE:
            return Chunk(header=header, payload=part.data)
        return chunk if self._keeps_payloads else Chunk(header=header)

    def decode(self, chunk: Chunk, old: np.ndarray, tables: bytes = b"") -> Change | None:
        found = self._decoded.get(id(chunk))
        return decode_change(chunk, old, tables) if found is None else found[1].result()

    def clear(self) -> None:
        """Forget all; what is held may change from now on."""
        for _, decoded in self._decoded.values():
            decoded.cancel()
        self._decoded = {}
        self._held = self._incoming = None

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
