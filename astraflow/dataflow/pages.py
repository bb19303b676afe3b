"""Pages: long lists, handed out in parts that fit together while the list grows at its front."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

from astraflow.core.errors import AstraflowError, Reason

Item = TypeVar("Item")

_DEFAULT = 50
_LARGEST = 1000


def page_of(
    items: Sequence[Item],
    *,
    key: Callable[[Item], str],
    size: int,
    token: str,
    selection: bytes,
) -> tuple[Sequence[Item], str]:
    """Return one page and the token of the next one; an empty token ends the list.

    Args:
        items: Newest first.
        key: Unique per item.
        size: Items wanted; 0: 50, more than 1,000: 1,000.
        token: Of the page before; empty: from the start.
        selection: How the items were selected; the same for all pages of a list.

    Raises:
        AstraflowError: INVALID_FIELD for a token of another selection.
    """
    digest = blake2b(selection, digest_size=8).hexdigest()
    start = 0
    if token:
        given, _, last = token.partition(":")
        if given != digest:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                "page_token is of a list with other filters; start again without it",
                metadata={"field": "page_token"},
            )
        # What is no longer in the list was at its old end, and so was all that follows.
        places = {key(item): place for place, item in enumerate(items)}
        start = places.get(last, len(items) - 1) + 1
    end = start + min(max(size, 0) or _DEFAULT, _LARGEST)
    page = items[start:end]
    return page, f"{digest}:{key(page[-1])}" if page and end < len(items) else ""
