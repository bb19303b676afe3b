import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.core import rollouts
from astraflow.core.rollouts import arrays_fault

rows = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 151_643, 2**31 - 1, -1, -(2**31)]),
        st.booleans(),
        st.sampled_from([0.0, -0.0, -0.5, -3e38, 1e-4, 9e-5, 1.1e-4, 1e-45, -1e-45])
        | st.sampled_from([float("inf"), float("-inf"), float("nan"), 3.0]),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.skipif(rollouts.is_sound is None, reason="built without a C compiler")
@given(rows=rows, branch=st.integers(-1, 41), more=st.sampled_from([0, 0, 0, 1, -1]))
def test_the_compiled_check_finds_what_the_one_in_numpy_finds(rows, branch, more):
    tokens = np.array([row[0] for row in rows], np.int32)
    mask = np.array([row[1] for row in rows], bool)
    logprobs = np.array([row[2] for row in rows], np.float32)
    for offset in {branch, 0}:
        arrays = tokens, mask, logprobs, offset, int(mask.sum()) + more
        assert rollouts.is_sound(*arrays) == (arrays_fault(*arrays) is None)


@pytest.mark.skipif(rollouts.is_sound is None, reason="built without a C compiler")
@given(rows=rows)
def test_sound_arrays_pass_the_compiled_check(rows):
    mask = np.array([row[1] for row in rows], bool)
    tokens = np.abs(np.array([max(row[0], 0) for row in rows], np.int32))
    logprobs = np.where(mask, -0.25, 0).astype(np.float32)
    assert rollouts.is_sound(tokens, mask, logprobs, 0, int(mask.sum()))
