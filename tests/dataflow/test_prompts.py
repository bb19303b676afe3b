"""Prompts are drawn pass after pass, and a hub that was restarted goes on where it was."""

import pytest

from astraflow.config.work import DataSet
from astraflow.dataflow.prompts import PromptSource
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
    whole = source().draw(20)
    again = source()
    again.seek(count)
    assert again.draw(20 - count) == whole[count:]


def test_what_was_drawn_before_is_not_read_again(source, rows):
    again = source()
    again.seek(1_000_003)
    again.draw(2)
    assert len(rows.asked) == 2


@pytest.mark.parametrize(("count", "left"), [(4, 6), (10, 0), (12, 0)])
def test_the_last_pass_ends_where_it_would_have(source, count, left):
    again = source(epochs=2)
    again.seek(count)
    assert len(again.draw(100)) == left
