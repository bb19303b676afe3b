import asyncio
import threading

import pytest

from astraflow.client.loop_thread import LoopThread


def test_results_and_errors_reach_the_caller():
    async def work(value):
        await asyncio.sleep(0)
        if value < 0:
            raise ValueError("negative")
        return value, threading.current_thread().name

    with LoopThread(name="its-own") as loop:
        assert loop.call(work(1)) == (1, "its-own")
        with pytest.raises(ValueError, match="negative"):
            loop.call(work(-1))


def test_closing_cancels_what_still_runs():
    ended = threading.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    loop = LoopThread()
    loop.start()
    future = loop.spawn(work())
    loop.call(asyncio.sleep(0))
    loop.close()
    assert ended.is_set()
    assert future.cancelled()
    loop.close()
