"""Places: how many episodes run at once, and that evaluations have some of their own."""

import asyncio

from astraflow.core.tasks import TaskPurpose


class Places:
    """Places of episodes; whoever finds none waits his turn.

    Example:
        40 places and 4 for evaluations: an evaluation takes one of the 4, and one of the 40 when
        these are taken. Training has 40 in any case that no more than 4 are evaluated.
    """

    def __init__(self, *, capacity: int, eval_extra: int = 0) -> None:
        """Have all of them free.

        Args:
            capacity: For any episode.
            eval_extra: For evaluations alone.
        """
        self._any = asyncio.Semaphore(capacity)
        self._eval = asyncio.Semaphore(eval_extra)

    def of(self, purpose: TaskPurpose) -> asyncio.Semaphore:
        """Return what an episode that begins now has to hold."""
        is_own = purpose is TaskPurpose.EVAL and not self._eval.locked()
        return self._eval if is_own else self._any
