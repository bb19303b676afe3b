"""What is written by hand is what pickle reads."""

import pickle

import numpy as np
import pytest
import torch

from astraflow.codec.pickles import pickle_chunks, read_pickle
from astraflow.core.errors import AstraflowError

VALUE = {
    "scalars": [None, True, 3, -(1 << 40), 1.5, "ä", b"b"],
    "nested": {"tuple": (1, (2,)), "empty": [[], {}, ()], 4: "x" * 70_000},
}


def written(value):
    return b"".join(pickle_chunks(value))


def test_pickle_reads_it():
    assert pickle.loads(written(VALUE)) == VALUE


def test_our_own_reader_reads_it():
    assert read_pickle(written(VALUE)) == VALUE


@pytest.mark.parametrize("name", ["bool", "int32", "int64", "uint8", "float16", "float32"])
def test_arrays_become_tensors(name):
    whole = np.arange(6).reshape(2, 3).astype(name)
    for array in (whole, whole.T, whole[:0]):
        tensor = pickle.loads(written({"a": array}))["a"]
        assert tensor.dtype is getattr(torch, name)
        assert np.array_equal(tensor.numpy(), array)
        assert np.array_equal(read_pickle(written(array)), array)


def test_a_large_array_is_not_copied():
    array = np.zeros(1 << 16, np.int32)
    assert any(np.shares_memory(np.frombuffer(c, np.uint8), array) for c in pickle_chunks([array]))


def test_what_no_peer_reads_is_not_written():
    with pytest.raises(AstraflowError, match="object is not written"):
        pickle_chunks([object()])
