"""Admission: how much work may be open, and how new its versions must be.

A version has the optimizer steps of `steps_per_version` batches, one unless the recipe says more.
With `max_staleness` S, N steps per version and B groups per batch, work that is B * N * (S + 1)
groups ahead of the trainer would be S + 1 versions old when its turn comes: so no more than that
is open at once. Where versions are only published when they are asked for (N is None), none comes
but the one that was asked for.

Example:
    B = 16, N = 1, S = 2, newest version 7 of 7 steps, one batch leased, 20 groups waiting behind
    it. The batch in the trainer's hands makes version 8, so the next batch trains on 8. The new
    group has 20 groups, one whole batch, before it: it is trained on version 9 and must be
    sampled from version 7 or newer. With N = 4 all three batches are trained on version 7, whose
    four steps they are, and the new group may be sampled from version 5.
"""


def train_version(
    *,
    newest: int,
    newest_step: int,
    step: int,
    leased_batch_count: int,
    batches_ahead: int = 0,
    steps_per_version: int | None = 1,
    is_asked: bool = False,
) -> int:
    """Return the version that a batch trains on which is leased after others.

    Args:
        newest: Newest published version.
        newest_step: Optimizer steps behind it.
        step: Optimizer steps acknowledged.
        leased_batch_count: Batches in the trainer's hands; each makes a step.
        batches_ahead: Batches that are leased before it.
        steps_per_version: None: a version is made when it is asked for.
        is_asked: Whether the trainer was asked for one that has not come.
    """
    steps = max(0, step + leased_batch_count - newest_step) + batches_ahead
    made = 0 if steps_per_version is None else steps // steps_per_version
    return newest + max(made, int(is_asked and steps > 0))


def min_version(*, train_version: int, max_staleness: int) -> int:
    """Return the oldest version that a new group may be sampled from.

    Args:
        train_version: Of the batch that it will be in.
        max_staleness: Versions between sampling and training, at most.
    """
    return max(0, train_version - max_staleness)


def open_limit(
    *,
    groups_per_batch: int,
    max_staleness: int,
    steps_left: int | None,
    steps_per_version: int | None = 1,
) -> int:
    """Return how many groups may be open; steps_left None: no limit of steps."""
    batches = (max_staleness + 1) * (steps_per_version or 1)
    if steps_left is not None:
        batches = min(batches, steps_left)
    return batches * groups_per_batch
