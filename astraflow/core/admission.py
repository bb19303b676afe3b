"""Admission: how much work may be open, and how new its versions must be.

A policy trains on at most one batch per version. With `max_staleness` S and B groups per
batch, work that is B * (S + 1) groups ahead of the trainer would be S + 1 versions old when
its turn comes: so no more than that is open at once.

Example:
    B = 16, S = 2, newest version 7 of 7 steps, one batch leased, 20 groups waiting behind it.
    The batch in the trainer's hands makes version 8, so the next batch trains on 8. The new
    group has 20 groups, one whole batch, before it: it is trained on version 9 and must be
    sampled from version 7 or newer.
"""


def train_version(*, newest: int, newest_step: int, step: int, leased_batch_count: int) -> int:
    """Return the version that the next batch to be leased trains on.

    Args:
        newest: Newest published version.
        newest_step: Optimizer steps behind it.
        step: Optimizer steps acknowledged.
        leased_batch_count: Batches in the trainer's hands; each makes a version.
    """
    return newest + max(0, step + leased_batch_count - newest_step)


def min_version(
    *, train_version: int, groups_ahead: int, groups_per_batch: int, max_staleness: int
) -> int:
    """Return the oldest version that a new group may be sampled from.

    Args:
        train_version: Of the next batch.
        groups_ahead: Open groups that are not leased.
        groups_per_batch: Groups per batch.
        max_staleness: Versions between sampling and training, at most.
    """
    return max(0, train_version + groups_ahead // groups_per_batch - max_staleness)


def open_limit(*, groups_per_batch: int, max_staleness: int, steps_left: int | None) -> int:
    """Return how many groups may be open; steps_left None: no limit of steps."""
    batches = max_staleness + 1
    if steps_left is not None:
        batches = min(batches, steps_left)
    return batches * groups_per_batch
