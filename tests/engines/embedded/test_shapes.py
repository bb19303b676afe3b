import pytest

from astraflow.engines.embedded.shapes import grown, padded_length, padded_rows, row_step


def test_few_rows_are_computed_as_sixteen():
    assert [padded_rows(n, step=1) for n in (1, 16, 17)] == [16, 16, 17]


@pytest.mark.parametrize("widths", [[96, 288, 32], [96, 48, 16], [100, 64], [7]])
def test_rows_times_width_is_a_multiple_of_what_is_computed_at_once(widths: list[int]):
    rows = padded_rows(17, step=row_step(widths))
    assert all(rows * width % 32 == 0 for width in widths)


@pytest.mark.parametrize("length", [1, 15, 16, 100, 128, 129, 1000])
def test_lengths_are_rounded_up_to_whole_vectors(length: int):
    padded = padded_length(length)
    assert padded >= length
    assert padded % 16 == 0
    assert padded - length < 64


def test_capacity_doubles_up_to_its_limit():
    assert grown(16, needed=40, limit=100) == 64
    assert grown(64, needed=70, limit=100) == 100
