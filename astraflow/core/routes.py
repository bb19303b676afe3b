"""Routes: which experts each token of a trajectory went through, as it was sampled."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

UNROUTED: Final = 0xFFFF
"""No expert: the token went through no model, as the last one that was sampled."""
ROUTED_EXPERTS: Final = "routed_experts"
"""Name of the column, u16[T, layers, k]; see `rollout/v1/column.proto`."""
_AXES: Final = 3


def routes_fault(values: np.ndarray) -> str | None:
    """Say why an array is no column of routes, or None."""
    if values.dtype != np.uint16 or values.ndim != _AXES:
        return f"column {ROUTED_EXPERTS} is not u16[tokens, layers, k]"
    return None


def filled_routes(lengths: Sequence[int], found: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Lay the routes of some rows end to end; those that do not tell theirs are UNROUTED.

    Args:
        lengths: Tokens of each row.
        found: u16[n, layers, k] of each; None where it is not told. One that is of another model
            than the first counts as not told.

    Returns:
        u16[T, layers, k]; None when no row tells.

    Example:
        >>> filled_routes([1, 2], [None, np.array([[[3]], [[4]]], "u2")]).ravel().tolist()
        [65535, 3, 4]
    """
    shape = next((each.shape[1:] for each in found if each is not None), None)
    if shape is None:
        return None
    return np.concatenate(
        [
            each
            if each is not None and each.shape[1:] == shape
            else np.full((length, *shape), UNROUTED, np.uint16)
            for length, each in zip(lengths, found, strict=True)
        ]
    )


def joined_routes(length: int, parts: Iterable[np.ndarray]) -> np.ndarray | None:
    """Return the routes of a trajectory from those of its generations.

    A token that several generations passed through keeps its first route, under which what
    follows it was sampled.

    Args:
        length: T.
        parts: u16[n, layers, k] each, of the first n tokens; in the order in which they came.

    Returns:
        u16[T, layers, k], UNROUTED where no part tells; None without parts.

    Example:
        >>> first, second = np.array([[[3]], [[UNROUTED]]], "u2"), np.array([[[4]], [[5]]], "u2")
        >>> joined_routes(3, [first, second]).ravel().tolist()
        [3, 5, 65535]
    """
    routes: np.ndarray | None = None
    for part in parts:
        if routes is None:
            routes = np.full((length, *part.shape[1:]), UNROUTED, np.uint16)
        mine = routes[: len(part)]
        mine[...] = np.where(mine == UNROUTED, part, mine)
    return routes
