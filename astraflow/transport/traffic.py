"""Traffic: payload that came over each lane, in this process, for its metrics."""

from collections import Counter
from typing import Final

from astraflow.wire.patches import SentChunk
from astraflow.wire.transfers import SentItem

RECEIVED_NBYTES: Final = Counter[str]()


def received(lane: str, item: SentItem) -> SentItem:
    """Count an item that came over a lane; return it."""
    if isinstance(item, SentChunk):
        RECEIVED_NBYTES[lane] += len(item.chunk.payload)
    return item
