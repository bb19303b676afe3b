"""Progress: what has come of one transfer, so that another lane can go on with the rest."""

from dataclasses import replace

from astraflow.core.errors import AstraflowError, Reason
from astraflow.wire.patches import SentChunk
from astraflow.wire.transfers import ChunkSet, SentItem, TransferPlan, TransferSpec, Waiting


class Progress:
    """Notes plan and chunks of a transfer.

    Attributes:
        spec: What was wanted at first.
    """

    def __init__(self, spec: TransferSpec) -> None:
        self.spec = spec
        self._plan: TransferPlan | None = None
        self._numbers: dict[int, int] = {}
        self._come: dict[int, set[int]] = {}
        self._count = 0
        self._is_resuming = False

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan to go on with."""
        return self._plan is not None

    @property
    def missing_count(self) -> int | None:
        """Chunks that have not come; None: it is not known."""
        return None if self._plan is None else self._plan.chunk_count - self._count

    @property
    def is_over(self) -> bool:
        """Whether all has come."""
        return self.missing_count == 0

    def note(self, item: SentItem) -> SentItem:
        """Note an item and return it."""
        if isinstance(item, TransferPlan):
            self._plan = item
        elif isinstance(item, SentChunk):
            self._come.setdefault(item.patch_index, set()).add(item.chunk.header.index)
            self._count += 1
        return item

    def rest(self) -> TransferSpec:
        """Return what is still wanted, of whom will answer with a plan of his own."""
        if self._plan is None:
            return self.spec
        self._is_resuming = True
        have = {each.root_digest: each for each in self.spec.have_chunks}
        for number, indexes in self._come.items():
            root = self._plan.patches[number].patch.root_digest
            before = have.get(root)
            if before is not None and not before.indexes:
                continue
            held = {index for run in before.indexes for index in run} if before else set[int]()
            have[root] = ChunkSet.of(root, held | indexes)
        return replace(self.spec, have_chunks=tuple(have.values()))

    def resume(self, item: SentItem) -> SentItem | None:
        """Return an item of another lane as one of the first plan; None: nothing new.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE when the source now goes another way.
        """
        if isinstance(item, TransferPlan):
            if not self._is_resuming or self._plan is None:
                return self.note(item)
            self._is_resuming = False
            self._match(item, self._plan)
            return None
        if isinstance(item, Waiting):
            return item
        number = self._numbers.get(item.patch_index, item.patch_index)
        return self.note(replace(item, patch_index=number))

    def _match(self, new: TransferPlan, plan: TransferPlan) -> None:
        roots = [index.patch.root_digest for index in plan.patches]
        for number, index in enumerate(new.patches):
            root = index.patch.root_digest
            if root not in roots:
                raise AstraflowError(
                    Reason.SOURCE_UNREACHABLE,
                    "the lane broke, and the source no longer has the patches that it began with",
                    retryable=True,
                )
            self._numbers[number] = roots.index(root)
