"""An event loop in a thread of its own, for callers that block."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from threading import Thread, current_thread
from typing import Any, Self, TypeVar

from astraflow.core.errors import AstraflowError, Reason

Result = TypeVar("Result")

# How often who waits looks whether the loop is still there.
_PATIENCE_S = 1.0


class LoopThread:
    """Runs coroutines for threads that wait for their results.

    One per process is enough. (Several event loops that use grpc.aio in one process work, but
    each of them logs a spurious BlockingIOError now and then: grpc/grpc#25364.)
    """

    def __init__(self, *, name: str = "astraflow-loop") -> None:
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._stopping = asyncio.Event()
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        self._thread.start()
        self._ready.result()

    def close(self) -> None:
        """Cancel what still runs and wait until all of it ended; idempotent."""
        if not self._thread.is_alive():
            return
        self._ready.result().call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and wait for its result; whatever it raises is raised here.

        Raises:
            AstraflowError: NOT_READY when the loop was closed before there was a result.
        """
        future = self.spawn(coroutine)
        try:
            return self.wait(future)
        finally:
            # Ctrl-C reaches the waiting thread, not the coroutine.
            future.cancel()

    def wait(self, future: "Future[Result]") -> Result:
        """Wait for what was spawned; as `call`."""
        while not wait([future], timeout=_PATIENCE_S).done:
            if not self._thread.is_alive():
                raise AstraflowError(Reason.NOT_READY, "the event loop has been closed")
        return future.result()

    def spawn(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Run a coroutine beside the caller."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._ready.result())

    def _run(self) -> None:
        asyncio.run(self._wait())

    async def _wait(self) -> None:
        self._ready.set_result(asyncio.get_running_loop())
        await self._stopping.wait()


class HostLoop(LoopThread):
    """The running event loop, for code that waits in threads: one loop serves all."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = current_thread()
        self._ready.set_result(asyncio.get_running_loop())
