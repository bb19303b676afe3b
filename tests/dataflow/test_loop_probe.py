import asyncio
import time

from astraflow.dataflow.metrics import LoopProbe


async def looks(probe, count):
    while probe.stats.tick_count < count:  # noqa: ASYNC110  # the probe has no event to wait for
        await asyncio.sleep(0)


async def test_work_that_keeps_the_loop_is_counted():
    with LoopProbe(interval_s=0.001) as probe:
        await looks(probe, 1)
        end = time.thread_time() + 0.08
        while time.thread_time() < end:
            pass
        await looks(probe, probe.stats.tick_count + 1)
    assert probe.stats.slow_count >= 1
    assert probe.stats.max_lag_s >= probe.stats.max_cpu_s > 0.05


async def test_a_probe_that_was_left_looks_no_more():
    with LoopProbe(interval_s=0.001) as probe:
        await looks(probe, 2)
    seen = probe.stats.tick_count
    await asyncio.sleep(0)
    assert probe.stats.tick_count == seen
