"""The store: what can be had of the last versions, and of the one in progress.

Payloads are kept of the forward patches only, which undo versions as well. The chunks of all others
(whole versions, patches over several versions, other profiles) are made again when they are
asked for, from the versions that they lead between: the encoding is canonical.
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from threading import Lock
from typing import Final

from astraflow.codec.chunks import Chunk, Encoding
from astraflow.codec.encode import encode_chunk
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import CodecProfile, PatchInfo
from astraflow.transport.frames import source_lost
from astraflow.weights.patches.history import History
from astraflow.weights.patches.patch import Patch, PatchName, Way, cheapest_patches, evicted
from astraflow.weights.patches.routes import Compact, decoding_s, profile_choices
from astraflow.wire.transfers import TransferSpec

# What forward patches may take in any case; else one whole version.
_SPARE_NBYTES: Final = 64 << 20
_READER_COUNT: Final = 16
_NEWEST: Final = "is no longer kept; pull the newest"


class PatchStore:
    """Offers the patches of the last versions of one policy; safe to use from any thread.

    Attributes:
        history: Which patches are made again from.
        keep: A reader so many versions behind still finds its way.
        compact: What coding a patch compactly as well has cost.
        likely_nbytes: Payload of the last forward patch: about what the next one will have.
        next: The version that is being made, or will be; and the patch that leads there from the
            one before, which grows while that is done.
    """

    def __init__(self, history: History, *, keep: int = 16) -> None:
        self.frame = history.shard_layout
        self.history = history
        self.keep = keep
        self.compact = Compact()
        self.next = (0, Patch())
        self.likely_nbytes = 0
        self._is_sparse = True
        self._room_nbytes = max(history.shard_layout.payload_nbytes, _SPARE_NBYTES)
        self._lock = Lock()
        # By the oldest version that they are made again from.
        self._patches: dict[int, dict[PatchName, Patch]] = {}
        self._requested: dict[int, None] = {}
        self._readers: deque[TransferSpec] = deque(maxlen=_READER_COUNT)

    def __contains__(self, name: PatchName) -> bool:
        with self._lock:
            return name in self._patches.get(_first(name), ())

    @property
    def patches(self) -> tuple[Patch, ...]:
        return self._since(0)

    @property
    def lasting_patches(self) -> tuple[Patch, ...]:
        """Those that are offered until the next version comes, whoever reads."""
        return self._since(self.history.lasting or 0)

    def _since(self, oldest: int) -> tuple[Patch, ...]:
        """Return those that are made again from this version, or later ones."""
        with self._lock:
            kept = [patches for first, patches in self._patches.items() if first >= oldest]
            return tuple(chain.from_iterable(patches.values() for patches in kept))

    def is_sound(self) -> bool:
        """Whether all payloads that are kept are what their digests say; reads them."""
        return all(patch.is_sound() for patch in self.patches)

    @property
    def requested_spans(self) -> tuple[int, ...]:
        """How many versions readers were behind of late, the last one first."""
        with self._lock:
            return (*reversed(self._requested),)

    @property
    def readers(self) -> tuple[TransferSpec, ...]:
        """What readers with known links have asked for of late."""
        with self._lock:
            return (*self._readers,)

    @contextmanager
    def making(self, version: int) -> Generator[Patch]:
        """Give the patch to the next version to be filled; readers may be waiting for it."""
        if self.next[0] != version:
            self.next = (version, Patch())
        patch, following = self.next[1], version
        try:
            yield patch
            following = version + 1
        finally:
            self._is_sparse = patch.is_finished or not patch.chunks
            if patch.is_finished:
                self.likely_nbytes = patch.info.payload_nbytes
            # Whoever finds it over looks what comes next.
            self.next = (following, Patch())
            if patch.is_finished:
                patch.end()
            elif following > version:
                patch.fail(evicted(version, version - 1, _NEWEST))
            else:
                again = f"version {version} failed and is made anew; ask for it again"
                patch.fail(source_lost(again))

    def is_sooner(self, spec: TransferSpec) -> bool:
        """Whether a reader has the next version sooner by what is made first.

        A compact patch is made after it, and where nearly all changes nothing may come of it.
        """
        model_nbytes, gained_s = self.history.shard_layout.payload_nbytes, 0.0
        if spec.goodput_bytes_per_s > 0:
            gained_s = self.compact.gained_s(spec, self.likely_nbytes, model_nbytes)
        return self._is_sparse and gained_s <= 0 and CodecProfile.FAST in profile_choices(spec)[0]

    def offer(self, patches: Sequence[Patch]) -> None:
        """Offer patches; what has become too old goes."""
        with self._lock:
            for patch in patches:
                name = PatchName.of(patch.info)
                self._patches.setdefault(_first(name), {})[name] = patch
        self.history.forget(keep=self.keep, room_nbytes=self._room_nbytes)
        oldest = self.history.oldest or 0
        with self._lock:
            for first in [first for first in self._patches if first < oldest]:
                del self._patches[first]

    def plan(self, spec: TransferSpec) -> Way:
        """Return the patches that lead from the base to the version, the cheapest for a reader.

        Raises:
            AstraflowError: VERSION_UNKNOWN when it was never published; VERSION_EVICTED when the
                version, or the base, is no longer kept; PATCH_UNKNOWN when the base is newer, or
                nothing is coded in a profile that the reader takes.
        """
        base, version, newest = spec.base_version, spec.version, self.history.newest
        if newest is None or not 0 <= version <= newest:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN,
                f"version {version} was never published here; the newest is {newest}",
                metadata={"version": str(version)},
            )
        if base is not None and base >= version:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN, f"no patch leads back from {base} to {version}"
            )
        patches, model_nbytes = self.patches, self.history.shard_layout.payload_nbytes

        had = {each.root_digest: each for each in spec.have_chunks}

        def cost(patch: Patch) -> float:
            """Return seconds, or bytes where the goodput of the reader is unknown."""
            info, have = patch.info, had.get(patch.info.root_digest)
            nbytes = info.payload_nbytes if have is None else patch.missing_nbytes(have)
            if spec.goodput_bytes_per_s <= 0:
                return nbytes
            whole = info.base_version is None
            decoded_s = decoding_s(
                spec, info.profile, model_nbytes, info.payload_nbytes, is_whole=whole
            )
            return nbytes / spec.goodput_bytes_per_s + decoded_s

        for profiles in profile_choices(spec):
            usable = [each for each in patches if each.info.profile in profiles]
            found = cheapest_patches(usable, base, version, cost)
            if found is not None:
                self.note(spec)
                return found[1]
        if cheapest_patches(patches, base, version, cost) is not None:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN, f"no way is coded {' or '.join(spec.profiles)} here"
            )
        raise evicted(version, base, _NEWEST)

    def find(self, name: PatchName) -> Patch:
        with self._lock:
            patch = self._patches.get(_first(name), {}).get(name)
        if patch is None:
            raise evicted(name.version, name.base_version, _NEWEST)
        return patch

    def chunk(self, info: PatchInfo, index: int) -> Chunk:
        """Return one chunk, made again where it was not kept."""
        patch = self.find(PatchName.of(info))
        if patch.is_kept:
            return patch.chunks[index]
        header, info = patch.headers[index], patch.info
        if header.encoding is Encoding.UNCHANGED:
            return Chunk(header=header)
        where, base = header, None
        if info.base_version is not None:
            base = self.history.bits_of(info.base_version)(where)
        bits, tables = self.history.bits_of(info.version)(where), patch.index.shared_tables
        chunk = encode_chunk(where, bits, base, profile=info.profile, tables=tables)
        return replace(chunk, header=header)

    @contextmanager
    def reading(self, infos: Sequence[PatchInfo]) -> Generator[None]:
        """Keep versions while patches between them are read: at most as much as without readers."""
        with self.history.reading([*map(_first, infos)]):
            yield

    def note(self, spec: TransferSpec) -> None:
        """Note how far behind a reader is, and its link: others may be so, and it again."""
        span = 1 if spec.base_version is None else spec.version - spec.base_version
        with self._lock:
            if spec.goodput_bytes_per_s > 0:
                self._readers.append(replace(spec, have_chunks=(), want_chunks=()))
            if span > 1:
                self._requested.pop(span, None)
                self._requested[span] = None


def _first(patch: PatchName | PatchInfo) -> int:
    """Return the oldest version that a patch is made again from."""
    return patch.version if patch.base_version is None else patch.base_version
