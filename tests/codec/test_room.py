"""Arrays for what decoding finds share blocks, and never each other's bytes."""

import gc
import threading

import numpy as np

from astraflow.codec.changes import empty_changes

U16 = np.dtype(np.uint16)


def fill(count, value):
    arrays = empty_changes(count, U16)
    for array in arrays:
        assert len(array) == count
        array[:] = value
    return arrays


def test_arrays_that_are_held_keep_what_is_written_into_them():
    held = [(number, fill(10_000 + number, number)) for number in range(200)]

    for number, arrays in held:
        assert all((array == number).all() for array in arrays)


def test_a_part_of_one_array_is_enough_to_keep_it():
    kept = [fill(20_000, 7)[2][100:200] for _ in range(60)]
    gc.collect()

    fill(600_000, 8), [fill(20_000, 9) for _ in range(100)]

    assert all((part == 7).all() for part in kept)


def test_threads_do_not_share_room():
    held, start = [], threading.Barrier(4)

    def work(value):
        start.wait()
        held.extend((value, fill(9_000, value)) for _ in range(50))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(held) == 200
    assert all((array == value).all() for value, arrays in held for array in arrays)


def test_any_count_and_width_has_room():
    for count in (0, 1, 63, 8192, 1 << 20):
        for width in (np.uint8, np.uint16, np.uint32, np.uint64):
            indices, before, values = empty_changes(count, np.dtype(width))
            assert (indices.dtype, before.dtype, values.dtype) == (np.uint32, width, width)
            assert len(indices) == len(before) == len(values) == count
