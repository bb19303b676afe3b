"""WeightPublisher: any mapping of names to arrays becomes the next version."""

from collections.abc import Mapping

import numpy as np

from astraflow.codec.chunks import CODEC_VERSION, Chunk
from astraflow.codec.encode import encode_patch, encode_whole, flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.core.versions import CodecProfile, PatchInfo, VersionInfo
from astraflow.weights.frame import Frame
from astraflow.weights.state import HeldState
from astraflow.weights.store import PatchStore, StoredPatch
from astraflow.wire.patches import PatchIndex, digest_of, root_digest


class WeightPublisher:
    """Encodes versions against a shadow copy of the one before, and keeps them to be pulled.

    In memory are the shadow, which is also what the newest whole patch is sent from, the next
    version while it is encoded, and what `PatchStore` keeps beside.

    Example:
        >>> layout = Layout.of([("w", Dtype.BF16, (2, 2))])
        >>> publisher = WeightPublisher(PolicyId("solver"), layout)
        >>> info = publisher.publish(0, {"w": np.zeros((2, 2), np.uint16)})
        >>> info.version, [patch.base_version for patch in info.patches]
        (0, [None])
    """

    def __init__(self, policy_id: PolicyId, layout: Layout, *, keep_patches: int = 16) -> None:
        """Start without a version.

        Args:
            policy_id: Whose weights.
            layout: Of every version.
            keep_patches: Forward patches kept for readers that are behind.
        """
        self.policy_id = policy_id
        self.store = PatchStore(Frame(layout), keep=keep_patches)
        self._shadow: HeldState | None = None

    @property
    def version(self) -> int | None:
        """The newest version that was published here."""
        return None if self._shadow is None else self._shadow.version

    def publish(
        self,
        version: int,
        tensors: Mapping[str, np.ndarray],
        *,
        step: int = 0,
        restored_from: int | None = None,
    ) -> VersionInfo:
        """Encode a version and make it ready to be pulled; the hub is told by the caller.

        One patch leads to it from nothing, another one from the version before where that is
        smaller.

        Args:
            version: One more than the one before; any number for the first.
            tensors: Bits of every tensor of the layout, as unsigned integers of its element size.
            step: Optimizer steps behind these weights.
            restored_from: Older version whose weights these are.

        Returns:
            What `PublishVersion` announces: patches smallest first, no sources.

        Raises:
            AstraflowError: VERSION_NOT_NEXT; LAYOUT_MISMATCH naming the tensor.
        """
        self._require_next(version)
        flat = self.store.frame.flatten(tensors)
        patches = [
            _stored(version, None, encode_whole(self.store.frame.runs, flat_bits(flat)).chunks)
        ]
        digest = self._digest_and_forward(version, flat, patches)
        self._shadow = HeldState(frame=self.store.frame, version=version, flat=flat, digest=digest)
        self.store.add(patches)
        return VersionInfo(
            policy_id=self.policy_id,
            version=version,
            layout_digest=self.store.frame.digest,
            content_digest=digest.to_bytes(),
            restored_from=restored_from,
            step=step,
            patches=tuple(sorted((p.info for p in patches), key=lambda info: info.payload_nbytes)),
        )

    def _require_next(self, version: int) -> None:
        if version < 0 or (self._shadow is not None and version != self._shadow.version + 1):
            raise AstraflowError(
                Reason.VERSION_NOT_NEXT,
                f"version {version} does not follow {self.version}",
                metadata={"next_version": str(0 if self.version is None else self.version + 1)},
            )

    def _digest_and_forward(
        self, version: int, flat: np.ndarray, patches: list[StoredPatch]
    ) -> StateDigest:
        """Return the state digest; add the patch from the version before when it is worth it."""
        frame, shadow = self.store.frame, self._shadow
        if shadow is None:
            return StateDigest.of(frame.layout, flat)
        patch = encode_patch(frame.runs, flat_bits(flat), flat_bits(shadow.flat), shadow.digest)
        if sum(len(chunk.payload) for chunk in patch.chunks) < patches[0].info.payload_nbytes:
            patches.append(_stored(version, shadow.version, patch.chunks))
        return patch.digest


def _stored(version: int, base_version: int | None, chunks: tuple[Chunk, ...]) -> StoredPatch:
    digests = tuple(map(digest_of, chunks))
    info = PatchInfo(
        base_version=base_version,
        version=version,
        profile=CodecProfile.FAST,
        codec_version=CODEC_VERSION,
        root_digest=root_digest(digests),
        chunk_count=len(chunks),
        payload_nbytes=sum(len(chunk.payload) for chunk in chunks),
    )
    return StoredPatch(index=PatchIndex(patch=info, chunk_digests=digests), chunks=chunks)
