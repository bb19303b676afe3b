import asyncio

from astraflow.dataflow.watches import Topic


async def test_a_change_between_the_look_and_the_wait_is_not_missed():
    topic = Topic()
    seen = topic.revision
    topic.touch()
    await topic.passed(seen)
    assert topic.revision == seen + 1


async def test_one_change_wakes_every_watcher():
    topic = Topic()
    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(topic.passed(topic.revision))
        await asyncio.sleep(0)
        topic.touch()
