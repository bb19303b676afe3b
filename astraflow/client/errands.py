"""Errands: calls to the run that go on beside training, one after the other."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

from astraflow.core.errors import AstraflowError, Reason


class Runner(Protocol):
    """Runs coroutines on another thread; `TrainerLife` is one."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        """Run it beside the caller."""
        ...

    def wait(self, future: Future[None]) -> None:
        """Wait for what was spawned; whatever it raises is raised here."""
        ...


class Errands:
    """Runs calls in the order in which they were given; after one that failed none is made."""

    def __init__(self, runner: Runner, *, on_error: Callable[[AstraflowError], None]) -> None:
        """Start with none.

        Args:
            runner: Runs them.
            on_error: Called on the runner's thread with the first error.
        """
        self._runner = runner
        self._on_error = on_error
        self._last: Future[None] | None = None

    def put(self, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Make a call after those that were given before."""
        before = self._last
        self._last = self._runner.spawn(self._after(before, call))

    def flush(self) -> None:
        """Wait until all were made.

        Raises:
            AstraflowError: The first error.
        """
        if self._last is not None:
            self._runner.wait(self._last)

    async def _after(
        self, before: Future[None] | None, call: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        if before is not None:
            await asyncio.wrap_future(before)
        try:
            await call()
        except AstraflowError as error:
            self._on_error(error)
            raise
        except Exception as error:
            failure = AstraflowError(Reason.INTERNAL, f"a call to the run failed: {error!r}")
            self._on_error(failure)
            raise failure from error
