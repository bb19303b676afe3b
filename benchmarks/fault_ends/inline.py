"""An executor that runs at once: what is handed to a thread costs no switch of threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class InlineExecutor(ThreadPoolExecutor):
    """Runs everything where it is submitted."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Return what is done already."""
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as a thread hands it on
            future.set_exception(error)
        return future


def run_inline() -> None:
    """Let the running loop use no other threads."""
    asyncio.get_running_loop().set_default_executor(InlineExecutor())
