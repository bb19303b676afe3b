"""Work on several ranges or chunks at once, in threads that live as long as the call.

The compiled loops, Zstandard and BLAKE3 release the interpreter's lock, so threads bring what the
cores have. Results come in the order of the items, so bytes do not depend on the count of threads.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_order(
    work: Callable[[_Item], _Result], items: Sequence[_Item], thread_count: int
) -> list[_Result]:
    """Return what each item becomes; see `each_in_order`."""
    return [*each_in_order(work, items, thread_count)]


def each_in_order(
    work: Callable[[_Item], _Result], items: Sequence[_Item], thread_count: int
) -> Iterator[_Result]:
    """Yield what each item becomes, as soon as it and those before it are done.

    Args:
        work: May be called by several threads at once when there is more than one.
        items: What it is called with.
        thread_count: 1: the caller's thread does all of it.
    """
    count = min(thread_count, len(items))
    if count < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(max_workers=count, thread_name_prefix="codec") as pool:
        yield from pool.map(work, items)
