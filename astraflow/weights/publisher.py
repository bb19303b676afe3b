"""WeightPublisher: any mapping of names to arrays becomes the next version."""

from collections.abc import Mapping

import numpy as np

from astraflow.codec.chunks import CODEC_VERSION
from astraflow.codec.encode import encode_patch
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.core.versions import CodecProfile, PatchInfo, VersionInfo
from astraflow.weights.flat import changes_between, elements
from astraflow.weights.store import PatchStore, StoredPatch
from astraflow.wire.patches import PatchIndex, digest_of, root_digest


class WeightPublisher:
    """Encodes versions against a shadow copy of the one before, and keeps them to be pulled.

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
        self.store = PatchStore(layout, keep=keep_patches)
        self._layout = layout
        self._shadow: np.ndarray | None = None
        self._version: int | None = None
        self._digest = StateDigest()

    @property
    def version(self) -> int | None:
        """The newest version that was published here."""
        return self._version

    def publish(
        self, version: int, tensors: Mapping[str, np.ndarray], *, step: int = 0
    ) -> VersionInfo:
        """Encode a version and make it ready to be pulled; the hub is told by the caller.

        Args:
            version: One more than the one before; any number for the first.
            tensors: Bits of every tensor of the layout, as unsigned integers of its element size.
            step: Optimizer steps behind these weights.

        Returns:
            What `PublishVersion` announces: patches smallest first, no sources.

        Raises:
            AstraflowError: VERSION_NOT_NEXT; LAYOUT_MISMATCH naming the tensor.
        """
        if self._version is not None and version != self._version + 1:
            raise AstraflowError(
                Reason.VERSION_NOT_NEXT,
                f"version {version} does not follow {self._version}",
                metadata={"next_version": str(self._version + 1)},
            )
        flat = self._flatten(tensors)
        patches = [self._patch(version, flat, None, None)]
        if self._shadow is None:
            self._digest = StateDigest.of(self._layout, flat)
        else:
            patches.append(self._patch(version, flat, self._shadow, self._version))
            changes = changes_between(self._layout, self._shadow, flat)
            self._digest = self._digest.changed(
                (change, elements(self._shadow, change.dtype)[change.positions])
                for change in changes
            )
        self.store.add(patches)
        self._shadow, self._version = flat, version
        return VersionInfo(
            policy_id=self.policy_id,
            version=version,
            layout_digest=self.store.layout_digest,
            content_digest=self._digest.to_bytes(),
            step=step,
            patches=tuple(
                sorted((patch.info for patch in patches), key=lambda info: info.payload_nbytes)
            ),
        )

    def _flatten(self, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        if tensors.keys() != self._layout.by_name.keys():
            names = sorted(tensors.keys() ^ self._layout.by_name.keys())
            raise AstraflowError(
                Reason.LAYOUT_MISMATCH, f"tensors and layout differ in {', '.join(names[:5])}"
            )
        flat = np.zeros(self._layout.nbytes, np.uint8)
        for name, bits in tensors.items():
            spec = self._layout.by_name[name]
            if bits.shape != spec.shape or bits.dtype != spec.dtype.bits:
                raise AstraflowError(
                    Reason.LAYOUT_MISMATCH,
                    f"tensor {name} is {bits.dtype}{list(bits.shape)}, the layout has "
                    f"{spec.dtype.bits}{list(spec.shape)}",
                )
            self._layout.view(flat, name)[...] = bits
        return flat

    def _patch(
        self, version: int, flat: np.ndarray, base: np.ndarray | None, base_version: int | None
    ) -> StoredPatch:
        chunks = encode_patch(self._layout, flat, base)
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
