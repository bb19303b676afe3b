"""Prompts are drawn pass after pass, and a hub that was restarted goes on where it was."""

import pytest

from astraflow.config.work import DataSet
from astraflow.core.batches import IssuedPrompt
from astraflow.core.effects import DrawAgain, DrawEvalPrompts
from astraflow.dataflow.prompts import DataSets, PromptSource, read_prompts
from astraflow.workflows.data_sets import DataSetReader


class Rows(list):
    """Rows that note which of them were asked for."""

    def __init__(self, rows):
        super().__init__(rows)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


@pytest.fixture
def rows():
    return Rows([{"prompt": f"row {number}"} for number in range(5)])


@pytest.fixture
def source(rows):
    reader = DataSetReader("train", rows, DataSet(path="unused"), seed=3)

    def make(epochs=None):
        return PromptSource(reader, name="train", epochs=epochs)

    return make


@pytest.mark.parametrize("count", [0, 2, 5, 13])
def test_a_source_goes_on_after_what_was_drawn(source, count):
    whole, _ = source().draw(20)
    again = source()
    again.seek(count)
    assert again.draw(20 - count) == (whole[count:], False)


def test_what_was_drawn_before_is_not_read_again(source, rows):
    again = source()
    again.seek(1_000_003)
    again.draw(2)
    assert len(rows.asked) == 2


@pytest.mark.parametrize(("count", "left"), [(4, 6), (10, 0), (12, 0)])
def test_the_last_pass_ends_where_it_would_have(source, count, left):
    again = source(epochs=2)
    again.seek(count)
    prompts, is_last = again.draw(100)
    assert (len(prompts), is_last) == (left, True)


@pytest.fixture
def large(rows):
    # Of a megabyte, as programs to be judged may have in their tests.
    rows[:] = [{"prompt": f"row {number}", "tests": "x" * (1 << 20)} for number in range(20)]
    return rows


def test_large_rows_are_drawn_a_few_at_a_time(large, source):
    reading, draws = source(epochs=1), []
    while not draws or not draws[-1][1]:
        draws.append(reading.draw(64))
    assert [len(prompts) for prompts, _ in draws] == [8, 8, 4]
    whole = [prompt for prompts, _ in draws for prompt in prompts]
    assert len({prompt.prompt_id for prompt in whole}) == 20


@pytest.mark.asyncio
async def test_large_rows_that_were_lost_come_in_events_of_bounded_size(large):
    data_sets = DataSets({"train": DataSetReader("train", large, DataSet(path="unused"), seed=3)})
    drawn, _ = data_sets.source("train", epochs=1).draw(8)
    lost = tuple(
        IssuedPrompt(prompt_id=each.prompt_id, data_set="train", epoch=0, number=number)
        for number, each in enumerate([*drawn, *drawn[:4]])
    )
    events = [each async for each in read_prompts(DrawAgain(prompts=lost), {}, data_sets)]
    assert [len(event.prompts) for event in events] == [8, 4]
    assert all(event.is_again for event in events)


@pytest.mark.asyncio
async def test_large_rows_to_be_measured_come_in_events_of_bounded_size(large):
    reader = DataSetReader("train", large, DataSet(path="unused"), seed=3)
    request = DrawEvalPrompts(eval_run_id="eval-1", data_sets=("train", "again"))
    data_sets = DataSets({"train": reader, "again": reader})
    events = [each async for each in read_prompts(request, {}, data_sets)]
    sizes = [{name: len(rows) for name, rows in event.prompts.items()} for event in events]
    assert sizes == [{name: size} for name in request.data_sets for size in (8, 8, 4)]
    assert [event.goes_on for event in events] == [True] * 5 + [False]
