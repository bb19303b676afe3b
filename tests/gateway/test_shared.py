"""Many who ask at once cost few questions, and none gets an answer from before it asked."""

import asyncio

import pytest

from astraflow.gateway.gateway import SharedQuestion


async def test_who_asks_meanwhile_shares_the_next_answer():
    asked, opened = [], asyncio.Event()

    async def ask():
        asked.append(len(asked) + 1)
        number = asked[-1]
        await opened.wait()
        return number

    question = SharedQuestion(ask)
    first = asyncio.create_task(question.answer())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asked == [1]
    others = [asyncio.create_task(question.answer()) for _ in range(5)]
    await asyncio.sleep(0)
    others[0].cancel()
    opened.set()
    assert await first == 1
    assert await asyncio.gather(*others[1:]) == [2] * 4
    assert await question.answer() == 3
    assert asked == [1, 2, 3]


async def test_what_is_raised_everybody_gets_and_the_next_one_asks_again():
    faults = [ValueError("no"), None]

    async def ask():
        fault = faults.pop(0)
        if fault is not None:
            raise fault
        return "yes"

    question = SharedQuestion(ask)
    both = await asyncio.gather(question.answer(), question.answer(), return_exceptions=True)
    assert [str(each) for each in both] == ["no", "no"]
    assert await question.answer() == "yes"
    with pytest.raises(IndexError):
        await question.answer()
