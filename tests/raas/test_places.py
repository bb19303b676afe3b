import asyncio

from astraflow.core.tasks import TaskPurpose
from astraflow.raas.runner import Places


async def test_evaluations_take_their_own_places_first_and_training_keeps_its_own():
    places = Places(capacity=1, eval_extra=1)
    async with places.of(TaskPurpose.EVAL), places.of(TaskPurpose.TRAIN):
        assert places.of(TaskPurpose.EVAL) is places.of(TaskPurpose.TRAIN)
        assert places.of(TaskPurpose.TRAIN).locked()
    async with places.of(TaskPurpose.TRAIN):
        assert not places.of(TaskPurpose.EVAL).locked()


async def test_without_any_extra_all_take_their_turns():
    places = Places(capacity=1)
    assert places.of(TaskPurpose.EVAL) is places.of(TaskPurpose.TRAIN)
    async with asyncio.timeout(60), places.of(TaskPurpose.EVAL):
        assert places.of(TaskPurpose.TRAIN).locked()
