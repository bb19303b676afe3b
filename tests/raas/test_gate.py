import asyncio

import pytest

from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import VersionRange
from astraflow.core.tensors import WeightUpdate
from astraflow.raas.policies import KEPT_S, VersionGate


def exactly(version):
    return VersionRange(min=version, max=version)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def gate(engine, clock):
    return VersionGate("solver", engine, clock=clock)


@pytest.fixture
def go_live(engine, gate):
    async def go(version):
        update = WeightUpdate(policy_id="solver", version=version, base_version=None, tensors=())
        async with gate.swapping():
            await engine.swap(update)

    return go


async def test_a_lower_bound_waits_and_takes_no_pin(engine, gate, go_live):
    await go_live(1)
    async with asyncio.TaskGroup() as group:
        entering = group.create_task(gate.enter(VersionRange(min=2)))
        await asyncio.sleep(0)
        assert gate.waiting_count == 1
        await go_live(2)
    assert entering.result() is None
    assert gate.waiting_count == 0
    assert not engine.pins


async def test_nothing_passes_before_the_first_version(gate, go_live):
    async with asyncio.TaskGroup() as group:
        entering = group.create_task(gate.enter(VersionRange()))
        await asyncio.sleep(0)
        assert not entering.done()
        await go_live(0)
    assert entering.result() is None


async def test_a_pin_outlives_its_task_until_another_evaluation(engine, gate, go_live):
    await go_live(0)
    assert await gate.enter(exactly(0)) == 0
    await gate.leave(0)
    await go_live(3)
    assert await gate.enter(exactly(0)) == 0
    assert await gate.enter(exactly(3)) == 3
    assert engine.pinned_versions == {0, 3}
    await gate.leave(0)
    assert engine.pinned_versions == {3}
    await gate.leave(3)
    await gate.release()
    assert not engine.pins


async def test_a_pin_that_nobody_uses_is_let_go_with_a_later_swap(engine, gate, go_live, clock):
    await go_live(0)
    await gate.enter(exactly(0))
    clock.advance(KEPT_S + 1)
    await go_live(1)
    await gate.leave(0)
    clock.advance(KEPT_S - 1)
    await go_live(2)
    assert engine.pinned_versions == {0}
    clock.advance(2)
    await go_live(3)
    assert not engine.pins


async def test_it_is_too_late_for_a_version_that_nobody_pinned(gate, go_live):
    await go_live(1)
    with pytest.raises(AstraflowError) as raised:
        await gate.enter(exactly(0))
    assert raised.value.reason is Reason.VERSION_NOT_SERVED
    assert raised.value.retryable


async def test_a_task_is_overtaken_when_its_version_is_skipped(gate, go_live):
    await go_live(1)
    entering = asyncio.ensure_future(gate.enter(exactly(2)))
    await asyncio.sleep(0)
    await go_live(3)
    with pytest.raises(AstraflowError, match="serves version 3 here"):
        await entering


async def test_the_next_update_is_the_oldest_that_a_task_must_have(gate, go_live):
    await go_live(1)
    assert gate.next_target(7) == 7
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(gate.enter(exactly(version))) for version in (5, 3, 9)]
        await asyncio.sleep(0)
        assert gate.next_target(7) == 3
        await go_live(3)
        assert gate.next_target(7) == 5
        for task in waiting:
            task.cancel()


async def test_a_withdrawn_task_leaves_no_pin_behind(engine, gate, go_live):
    await go_live(0)
    entering = asyncio.ensure_future(gate.enter(exactly(1)))
    await asyncio.sleep(0)
    await go_live(1)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    await gate.release()
    assert not engine.pins


async def test_what_a_withdrawn_task_was_about_to_pin_is_let_go(engine, gate, go_live):
    await go_live(0)
    async with engine._changed:
        # No pin is had meanwhile.
        entering = asyncio.ensure_future(gate.enter(exactly(0)))
        while not engine.pins:  # noqa: ASYNC110 - the task makes it true
            await asyncio.sleep(0)
        entering.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({entering})
    assert entering.cancelled()
    await gate.release()
    assert not engine.pins


async def test_who_is_withdrawn_while_another_is_let_pass_breaks_nothing(engine, gate, go_live):
    """Such as all tasks of a node that is asked to leave while its evaluation begins."""
    await go_live(0)
    first, second = (asyncio.ensure_future(gate.enter(exactly(1))) for _ in range(2))
    await asyncio.sleep(0)
    swapped = asyncio.Event()

    async def swap():
        async with gate.swapping():
            await engine.swap(
                WeightUpdate(policy_id="solver", version=1, base_version=None, tensors=())
            )
            await engine._changed.acquire()
            swapped.set()

    swapping = asyncio.ensure_future(swap())
    await swapped.wait()
    while not engine.pins:  # noqa: ASYNC110 - the gate makes it true
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    engine._changed.release()
    await swapping
    assert await first == 1
    assert gate.waiting_count == 0
    await gate.leave(1)
    await gate.release()
    assert not engine.pins
