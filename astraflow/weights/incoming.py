"""Incoming: the chunks of one version, verified one by one, from whichever source they come."""

from collections.abc import Iterator, Mapping

from astraflow.codec.chunks import Chunk, check_header
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout
from astraflow.core.versions import VersionInfo
from astraflow.wire.patches import (
    ChunkSet,
    PatchIndex,
    SentChunk,
    TransferPlan,
    TransferSpec,
    digest_of,
)


class Incoming:
    """Collects the chunks of the patches that lead to a version.

    Chunks are kept by the root of their patch, so what one source sent before it failed need not
    be sent by the next one.
    """

    def __init__(
        self, target: VersionInfo, known: Mapping[int, VersionInfo], *, base_version: int | None
    ) -> None:
        """Start with nothing received.

        Args:
            target: What is wanted.
            known: Versions as the run told them: their roots are trusted.
            base_version: What is held; None: nothing.
        """
        self.target = target
        self.base_version = base_version
        self.nbytes = 0
        self._known = known
        self._indexes: tuple[PatchIndex, ...] = ()
        self._chunks: dict[bytes, dict[int, Chunk]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether the plan starts from nothing."""
        return bool(self._indexes) and self._indexes[0].patch.base_version is None

    def spec(self) -> TransferSpec:
        """Return what to ask a source for."""
        have = [
            ChunkSet(root_digest=root, indexes=frozenset(chunks))
            for root, chunks in self._chunks.items()
            if chunks
        ]
        return TransferSpec(
            policy_id=self.target.policy_id,
            version=self.target.version,
            base_version=self.base_version,
            layout_digest=self.target.layout_digest,
            have_chunks=tuple(have),
        )

    def take(self, item: TransferPlan | SentChunk, layout: Layout) -> None:
        """Take the plan or a chunk of it.

        Raises:
            AstraflowError: DIGEST_MISMATCH, CHUNK_INVALID: the source lies or is broken.
        """
        if isinstance(item, TransferPlan):
            self._take_plan(item)
        else:
            self._take_chunk(item, layout)

    def require_complete(self) -> None:
        """Check that every chunk of the plan is here.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE: the source ended before.
        """
        for index in self._indexes:
            missing = index.patch.chunk_count - len(self._chunks[index.patch.root_digest])
            if missing:
                raise AstraflowError(
                    Reason.SOURCE_UNREACHABLE,
                    f"the source ended {missing} chunks before the end of version "
                    f"{index.patch.version}",
                )
        if not self._indexes:
            raise AstraflowError(Reason.SOURCE_UNREACHABLE, "the source ended without a plan")

    def patches(self) -> Iterator[tuple[PatchIndex, tuple[Chunk, ...]]]:
        """Yield the patches in the order in which they are applied, chunks by index."""
        for index in self._indexes:
            chunks = self._chunks[index.patch.root_digest]
            yield index, tuple(chunks[number] for number in range(index.patch.chunk_count))

    def _take_plan(self, plan: TransferPlan) -> None:
        at = self.base_version
        for number, index in enumerate(plan.patches):
            self._require_registered(index)
            base = index.patch.base_version
            if base != at and not (number == 0 and base is None):
                raise AstraflowError(
                    Reason.CHUNK_INVALID, f"a patch starts from version {base}, not from {at}"
                )
            at = index.patch.version
        if at != self.target.version or not plan.patches:
            raise AstraflowError(
                Reason.CHUNK_INVALID, f"the plan leads to version {at}, not {self.target.version}"
            )
        self._indexes = plan.patches
        for index in plan.patches:
            self._chunks.setdefault(index.patch.root_digest, {})

    def _require_registered(self, index: PatchIndex) -> None:
        info = self._known.get(index.patch.version)
        if info is None or index.patch not in info.patches:
            raise AstraflowError(
                Reason.DIGEST_MISMATCH,
                f"the run does not know this patch to version {index.patch.version}",
            )
        if index.root_digest != index.patch.root_digest:
            raise AstraflowError(
                Reason.DIGEST_MISMATCH, "the chunk digests do not add up to the registered root"
            )

    def _take_chunk(self, sent: SentChunk, layout: Layout) -> None:
        header = sent.chunk.header
        if not sent.patch_index < len(self._indexes):
            raise AstraflowError(Reason.CHUNK_INVALID, "a chunk of no patch of the plan")
        index = self._indexes[sent.patch_index]
        if not header.index < index.patch.chunk_count:
            raise AstraflowError(Reason.CHUNK_INVALID, f"the patch has no chunk {header.index}")
        if digest_of(sent.chunk) != index.chunk_digests[header.index]:
            raise AstraflowError(
                Reason.DIGEST_MISMATCH, f"chunk {header.index} has other bytes than registered"
            )
        check_header(header, layout)
        self._chunks[index.patch.root_digest][header.index] = sent.chunk
        self.nbytes += len(sent.chunk.payload)
