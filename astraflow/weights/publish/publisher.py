"""WeightPublisher: any mapping of names to arrays becomes the next version."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import structlog

from astraflow.codec.encode import encode_patch
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Layout
from astraflow.core.versions import CodecProfile, VersionInfo
from astraflow.weights.patches.history import History
from astraflow.weights.patches.layouts import WHOLE, Shard, ShardLayout
from astraflow.weights.patches.patch import Patch, PatchName, cheapest_patches, index_of, make_patch
from astraflow.weights.patches.routes import Compact
from astraflow.weights.patches.store import PatchStore
from astraflow.weights.publish.tensors import Exported, Reads
from astraflow.wire.signatures import PatchSigner
from astraflow.wire.weights import digest_of

if TYPE_CHECKING:
    from astraflow.weights.publish.device import DeviceCopy, DeviceExport


class Stages:
    """Seconds by stage, to a tenth of a millisecond; one begins where the one before ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = perf_counter()

    def end(self, name: str) -> None:
        now = perf_counter()
        self.seconds[f"{name}_s"] = round(now - self._started, 4)
        self._started = now


_MOST: Final = 4

# Each takes about 10 MB while it encodes: little beside so much.
_NBYTES_PER_THREAD: Final = 128 << 20


def thread_count_for(nbytes: int) -> int:
    """Return with how many threads so many bytes are coded: one per core, four at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MOST, cores or 1, nbytes // _NBYTES_PER_THREAD))


# A copy that is damaged is made anew; one that never stays sound is no accident.
_DAMAGE_LIMIT: Final = 3

log = structlog.get_logger(__name__)


class WeightPublisher:
    """Encodes versions against a copy of the one before, and keeps what readers can ask for.

    In memory are this copy, the forward patches of the last versions, and nothing else that
    grows with the model: arrays are read range by range. Readers never hold up a publication.
    Parameters of torch are held on to until others come in their place.

    Attributes:
        policy_id: Whose weights.
        history: The copy, and what leads back from it.
        store: Of what readers can ask for.
        is_damaged: Whether `scrub` has found the copy to be other than it should be. The next
            version then comes whole, from what is given alone, and readers go on from there.
        copies_on_device: Whether there is a second copy where the weights are, when all of them are
            tensors of torch on one device: they are compared there, and what changed alone is moved
            to the host. It takes as much of the device's memory as a version has. None: on a GPU of
            whose memory that is a twentieth at most, and free.

    Example:
        >>> layout = Layout.of([("w", Dtype.BF16, (2, 2))])
        >>> publisher = WeightPublisher(PolicyId("solver"), layout)
        >>> info = publisher.publish(0, {"w": np.zeros((2, 2), np.uint16)})
        >>> info.version, [patch.base_version for patch in info.patches]
        (0, [None])
    """

    def __init__(
        self,
        policy_id: PolicyId,
        layout: Layout,
        *,
        keep_patches: int = 16,
        shard: Shard = WHOLE,
        thread_count: int | None = None,
    ) -> None:
        """Start without a version.

        Args:
            policy_id: Whose weights.
            layout: Of every version.
            keep_patches: A reader so many versions behind needs no whole version.
            shard: What of every tensor is published here, when each rank publishes its own part;
                `combined` joins what they return.
            thread_count: Threads that encode; None: one per core and 128 MiB, four at most.
        """
        self.policy_id = policy_id
        self.history = History(ShardLayout(layout, shard))
        self.store = PatchStore(self.history, keep=keep_patches)
        self._thread_count = thread_count or thread_count_for(self.history.shard_layout.nbytes)
        self._reads = Reads(self.history.shard_layout)
        self._digest = StateDigest()
        self.is_damaged = False
        self._damage_count = 0
        # Odd while a version is made.
        self._edition = 0
        self._infos: dict[int, VersionInfo] = {}
        self._signing_key = b""
        self.copies_on_device: bool | None = False
        self._device: DeviceCopy | None = None

    @property
    def version(self) -> int | None:
        """The newest version that was published here, and can be pulled."""
        return max(self._infos, default=None)

    def info(self, version: int) -> VersionInfo:
        """Return what was announced of a version, without its patches.

        Raises:
            AstraflowError: VERSION_EVICTED when it is no longer kept.
        """
        if version not in self._infos:
            raise AstraflowError(Reason.VERSION_EVICTED, f"version {version} is no longer kept")
        return self._infos[version]

    def sign_with(self, seed: bytes) -> None:
        """Sign what is published from now on, so that it proves itself wherever it is stored.

        One key is for all: only the first seed counts.

        Args:
            seed: TrainerRegistration.signing_seed; empty: the hub is of an earlier release.

        Raises:
            AstraflowError: INVALID_FIELD for a seed of another size than 32 bytes.
        """
        if seed and not self._signing_key:
            signer = PatchSigner(seed)
            self._signing_key = signer.public_key
            self.history.sign = partial(signer.signed, layout_digest=self.store.frame.digest)

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        step: int = 0,
        restored_from: int | None = None,
    ) -> VersionInfo:
        """Encode a version and make it ready to be pulled; the hub is told by the caller.

        A patch leads to it from the version before, a compact one too where a reader's link is
        slow. The first version, and one to which no reader would find a way from nothing, comes
        whole as well.

        Args:
            version: One more than the one before; any number for the first.
            tensors: Every tensor of the layout, by name: what `reader_of` takes. They are read
                before this returns, and never after.
            step: Optimizer steps behind these weights.
            restored_from: Older version whose weights these are.

        Returns:
            What `PublishVersion` announces: patches smallest first, no sources.

        Raises:
            AstraflowError: VERSION_NOT_NEXT; LAYOUT_MISMATCH naming the tensor; DIGEST_MISMATCH
                when the copy was found damaged three times in a row.
        """
        newest = self.history.newest
        if version < 0 or (newest is not None and version != newest + 1):
            raise AstraflowError(
                Reason.VERSION_NOT_NEXT,
                f"version {version} does not follow {newest}",
                metadata={"next_version": str(0 if newest is None else newest + 1)},
            )
        if self._damage_count >= _DAMAGE_LIMIT:
            raise AstraflowError(
                Reason.DIGEST_MISMATCH,
                f"the copy of the weights of {self.policy_id} was damaged in memory"
                f" {self._damage_count} times in a row; start the trainer on another machine,"
                " it goes on from its last checkpoint",
            )
        self._edition += 1
        try:
            with self.store.making(version) as patch:
                return self._publish(version, tensors, step, restored_from, patch)
        finally:
            self._edition += 1

    def flush(self) -> None:
        """Do what a publication leaves undone; else the next one does it. Safe from any thread.

        Call it once the version was announced: nobody waits for it.
        """
        self.history.flush()

    def scrub(self) -> bool | None:
        """Compare all that is kept with its digests; safe from any thread but in `publish`.

        Returns:
            Whether it is as it should be; None: there is no version yet, or one came meanwhile.
        """
        edition, wanted = self._edition, self._digest
        if edition % 2 or self.history.newest is None:
            return None
        device = self._device
        is_sound = self.history.digest() == wanted and self.store.is_sound()
        is_sound = is_sound and (device is None or device.digest() == wanted)
        if self._edition != edition:
            return None
        if is_sound:
            self._damage_count = 0
        elif not self.is_damaged:
            self.is_damaged, self._damage_count = True, self._damage_count + 1
            log.error(
                "the trainer's copy of the weights is damaged: the next version comes whole",
                policy_id=self.policy_id,
                version=self.history.newest,
            )
        return not self.is_damaged

    def _publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        step: int,
        restored_from: int | None,
        patch: Patch,
    ) -> VersionInfo:
        exported, stages = Exported(self.history.shard_layout, self._reads.of(tensors)), Stages()
        on_device = self._exported_on_device(tensors)
        if self.history.newest is None or self.is_damaged:
            self.is_damaged = False
            self._device = None
            self._digest = self.history.start(version, exported.bits)
            stages.end("copy")
            patches: list[Patch] = []
        else:
            patches = self._forward(version, exported, on_device, stages, patch)
        if on_device is not None and on_device.device is not None and self._device is None:
            from astraflow.weights.publish.device import DeviceCopy  # noqa: PLC0415 - loads torch

            part, newest = self.history.shard_layout, self.history.newest_bits
            self._device = DeviceCopy(part, on_device.device, newest)
            stages.end("upload")
        self.store.offer(patches)
        lasting = self.store.lasting_patches
        found = cheapest_patches(lasting, None, version, lambda p: p.info.payload_nbytes)
        if found is None or found[0] > 2 * self.history.shard_layout.payload_nbytes:
            # No way from nothing, or one that costs more than two whole versions.
            patches.append(make_patch(self.history, None, version))
            self.store.offer(patches)
            stages.end("whole")
        log.info(
            "a version was encoded",
            policy_id=self.policy_id,
            version=version,
            patch_nbytes=min((p.info.payload_nbytes for p in patches), default=0),
            gather_s=round(exported.gather_s, 4),
            **stages.seconds,
        )
        return self._enter(version, patches, step, restored_from)

    def _exported_on_device(self, tensors: Mapping[str, Any]) -> "DeviceExport | None":
        """Return what reads the tensors on their device; None: the host does."""
        is_asked = self.copies_on_device
        if is_asked is None:
            is_asked = any(getattr(each, "is_cuda", False) for each in tensors.values())
        if not is_asked or "torch" not in sys.modules:
            return None
        from astraflow.weights.publish.device import DeviceExport  # noqa: PLC0415 - loads torch

        export = DeviceExport(self.history.shard_layout, tensors)
        if self._device is not None and self._device.device != export.device:
            self._device = None
        is_wanted = self.copies_on_device or self._device is not None or export.has_room
        return export if export.device is not None and is_wanted else None

    def _forward(
        self,
        version: int,
        exported: Exported,
        on_device: "DeviceExport | None",
        stages: Stages,
        patch: Patch,
    ) -> list[Patch]:
        """Return the patch from the version before; none when raw bytes are as good."""
        part, base = self.history.shard_layout, self.history.newest
        if on_device is not None and self._device is not None:
            encoded = self._device.encode(on_device.bits, self._digest, made=patch.add)
        else:
            newest, threads = self.history.newest_bits, self._thread_count
            encoded = encode_patch(
                part, exported.bits, newest, self._digest, thread_count=threads, made=patch.add
            )
        stages.end("encode")
        whole_nbytes = part.payload_nbytes
        nbytes = sum(chunk.header.payload_nbytes for chunk in encoded.chunks)
        is_of_use = base is not None and (nbytes < whole_nbytes or not whole_nbytes)
        if is_of_use:
            name = PatchName(version=version, base_version=base, shard=part.shard)
            digests = [*map(digest_of, encoded.chunks)]
            tables, sign = encoded.shared_tables, self.history.sign
            patch.finish(index_of(name, digests, nbytes, tables, sign=sign))
        stages.end("digest")
        self.history.advance(version, encoded.chunks)
        self._digest = encoded.digest
        stages.end("advance")
        if base is None or not is_of_use:
            return []
        if not self.store.compact.is_worth(self.store.readers, nbytes, whole_nbytes):
            return [patch]
        profile = CodecProfile.COMPACT
        compact = make_patch(self.history, base, version, profile=profile, is_kept=True)
        stages.end("compact")
        self.store.compact = Compact(
            share=compact.info.payload_nbytes / nbytes,
            encoded_per_s=whole_nbytes / max(stages.seconds["compact_s"], 1e-9),
        )
        return [patch, compact]

    def _enter(
        self, version: int, patches: list[Patch], step: int, restored_from: int | None
    ) -> VersionInfo:
        info = VersionInfo(
            policy_id=self.policy_id,
            version=version,
            layout_digest=self.store.frame.digest,
            content_digest=self._digest.to_bytes(),
            restored_from=restored_from,
            step=step,
            patches=(),
            signing_key=self._signing_key,
        )
        oldest = self.history.oldest or 0
        self._infos = {v: i for v, i in self._infos.items() if v >= oldest} | {version: info}
        infos = sorted((patch.info for patch in patches), key=lambda each: each.payload_nbytes)
        return replace(info, patches=tuple(infos))


def combined(infos: list[VersionInfo]) -> VersionInfo:
    """Return what the run is told of a version, from what `publish` returned on each rank.

    Raises:
        AstraflowError: INVALID_FIELD when they are not the parts of one version.
    """
    first = infos[0]
    patches = tuple(patch for info in infos for patch in info.patches)
    ranks = sorted({patch.shard_rank for patch in patches})
    if ranks != [*range(len(infos))] or any(
        (each.version, each.layout_digest, each.signing_key)
        != (first.version, first.layout_digest, first.signing_key)
        for each in infos
    ):
        raise AstraflowError(
            Reason.INVALID_FIELD, f"these are not the parts of version {first.version}: {ranks}"
        )
    digest = StateDigest()
    for info in infos:
        digest = digest.plus(StateDigest.from_bytes(info.content_digest))
    ordered = sorted(patches, key=lambda patch: patch.payload_nbytes)
    return replace(first, content_digest=digest.to_bytes(), patches=tuple(ordered))
