"""Ration: how much one source may send in one transfer, so that every transfer ends."""

from astraflow.core.errors import AstraflowError, Reason
from astraflow.wire.patches import SentChunk
from astraflow.wire.transfers import TransferPlan


class Ration:
    """Counts what comes: the plan, and each of its chunks twice at most.

    A lane that broke and goes on elsewhere may send a chunk again; who sends true chunks without
    end is a liar all the same.
    """

    def __init__(self) -> None:
        self._left = 1
        self._is_planned = False

    def take(self, item: TransferPlan | SentChunk) -> None:
        """Count an item.

        Raises:
            AstraflowError: CHUNK_INVALID when it is one too many.
        """
        self._left -= 1
        if self._left < 0:
            raise AstraflowError(
                Reason.CHUNK_INVALID, "a source sends more than the chunks of its plan"
            )
        if isinstance(item, TransferPlan) and not self._is_planned:
            self._is_planned = True
            self._left += 2 * sum(index.patch.chunk_count for index in item.patches)
