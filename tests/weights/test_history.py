"""Any version that is kept can be read, range by range, while the next ones come."""

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout


def state(history, version):
    bits = history.bits_of(version)
    return [bits(where).tobytes() for where in history.shard_layout.ranges()]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 99),
    steps=st.lists(
        st.tuples(st.sampled_from([0, 0.01, 0.3, 1]), st.booleans()), min_size=1, max_size=8
    ),
)
def test_every_version_is_what_it_was(tools, seed, steps):
    training = tools.training(seed=seed)
    history, were = training.publisher.history, []
    for share, is_noise in [(0, False), *steps]:
        training.publish(share=share, is_noise=is_noise)
        were.append(state(history, len(were)))

    for version, was in enumerate(were):
        assert state(history, version) == was


def test_a_version_that_is_too_old_cannot_be_read(tools):
    training = tools.training(keep_patches=2)
    for _ in range(5):
        training.publish()
    history = training.publisher.history

    assert (history.oldest, history.newest) == (2, 4)
    with pytest.raises(AstraflowError) as caught:
        state(history, 1)
    assert caught.value.reason is Reason.VERSION_EVICTED


def test_readers_beside_a_writer_never_see_half_a_version(tools):
    layout = Layout.of([("w", Dtype.BF16, (3 << 20,)), ("x", Dtype.F32, (7,))])
    training = tools.training(layout)
    training.publish()
    history = training.publisher.history
    was, seen, is_over = state(history, 0), [], threading.Event()

    def read():
        while not is_over.is_set():
            seen.append(state(history, 0) == was)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(6):
        training.publish()
    is_over.set()
    reader.join()

    assert seen
    assert all(seen)


def test_what_fails_while_it_is_read_leaves_the_version_before(training):
    training.publish()
    was = state(training.publisher.history, 0)

    class Broken(np.ndarray):
        def reshape(self, *shape):
            raise OSError("gone")

    tensors = dict(training.tensors)
    tensors["d"] = tensors["d"].view(Broken)
    tensors["a"] = tensors["a"] + 1
    with pytest.raises(OSError, match="gone"):
        training.publisher.publish(1, tensors)

    assert state(training.publisher.history, 0) == was
    assert training.publish().version == 1
