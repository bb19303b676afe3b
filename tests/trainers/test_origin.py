"""Versions are read from live weights, and never from those of the next step."""

from functools import partial
from threading import Event

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.trainers.origin import Publishing, WeightOrigin
from astraflow.weights.patches.layouts import Shard
from astraflow.weights.publish.publisher import WeightPublisher, combined

LAYOUT = Layout.of([("w", Dtype.F32, (64,))])


class Herald:
    def __init__(self):
        self.told, self.calls = [], []

    def announce(self, info, *, then):
        self.told.append(info)
        self.calls.append(then)


class Slow:
    """An array that can be read once it is let go."""

    def __init__(self, values):
        self.values, self.is_asked, self.is_free = values, Event(), Event()

    def __array__(self, dtype=None, copy=None):
        self.is_asked.set()
        assert self.is_free.wait(200)
        return self.values


class Engine:
    """Publishes one array; the rest of a `TrainEngine` is not needed here."""

    def __init__(self, values):
        self.weights = values

    def named_parameters(self):
        return [("w", self.weights)]


class WarningEngine(Engine):
    def before_change(self, call):
        self.hold = call


@pytest.fixture
def herald():
    return Herald()


@pytest.fixture
def publisher():
    return WeightPublisher(PolicyId("solver"), LAYOUT)


def origin_of(engine, publisher, herald, **options):
    return WeightOrigin(
        engine,
        layout=LAYOUT,
        publishing=Publishing(publisher),
        herald=herald,
        first_version=3,
        **options,
    )


def bits_of(publisher):
    (where,) = publisher.history.shard_layout.ranges()
    return publisher.history.newest_bits(where).view(np.float32)


def test_an_engine_that_warns_computes_while_its_weights_are_read(herald, publisher):
    values = np.arange(64, dtype=np.float32)
    slow = Slow(values)
    engine = WarningEngine(slow)
    origin = origin_of(engine, publisher, herald)
    published = origin.publish(step=1)
    assert slow.is_asked.wait(200)
    assert (published.version, published.made.done()) == (3, False)
    slow.is_free.set()
    engine.hold()
    assert published.made.done()
    values += 1
    assert bits_of(publisher).tolist() == list(range(64))
    assert published.metrics["weights/version"] == 3
    assert published.metrics["weights/bytes"] > 0


class OfTwo:
    """Publishes the halves of an array as two ranks do."""

    def __init__(self):
        self.ranks = [
            WeightPublisher(PolicyId("solver"), LAYOUT, shard=Shard(rank=rank, count=2))
            for rank in range(2)
        ]

    def publish(self, version, tensors, **of_version):
        halves = np.split(tensors["w"], 2)
        return combined(
            [
                each.publish(version, {"w": half}, **of_version)
                for each, half in zip(self.ranks, halves, strict=True)
            ]
        )


def test_the_bytes_of_a_version_are_those_of_all_its_shards(herald):
    values = np.random.default_rng(0).normal(size=64).astype(np.float32)
    origin = origin_of(Engine(values), OfTwo(), herald)
    whole = origin.publish(step=1)
    assert whole.metrics["weights/bytes"] >= values.nbytes
    assert whole.metrics["weights/density"] == whole.metrics["weights/bytes"] / values.nbytes
    values[::16] += 1
    changed = origin.publish(step=2)
    by_shard = {}
    for patch in changed.made.result().patches:
        if patch.base_version is not None:
            by_shard[patch.shard_rank] = patch.payload_nbytes
    assert len(by_shard) == 2
    assert changed.metrics["weights/bytes"] == sum(by_shard.values())


def test_the_weights_of_any_other_engine_are_read_before_it_goes_on(herald, publisher):
    values = np.zeros(64, np.float32)
    origin = origin_of(Engine(values), publisher, herald)
    published = origin.publish(step=1)
    assert published.made.done()
    values += 1
    assert (origin.publish(step=2).version, bits_of(publisher).tolist()) == (4, [1.0] * 64)
    assert [each.result().version for each in herald.told] == [3, 4]


def test_what_cannot_be_published_is_raised_or_told(herald, publisher):
    wrong = np.zeros(63, np.float32)
    with pytest.raises(AstraflowError, match="tensor w has the shape"):
        origin_of(Engine(wrong), publisher, herald).publish(step=1)
    engine = WarningEngine(wrong)
    origin_of(engine, publisher, herald).publish(step=1)
    engine.hold()
    assert "tensor w has the shape" in str(herald.told[-1].exception())


def test_followers_are_woken_once_the_run_knows(herald, publisher):
    woken = []
    follower = partial(woken.append, 1)
    origin = origin_of(Engine(np.zeros(64, np.float32)), publisher, herald, followers=[follower])
    origin.publish(step=1)
    assert not woken
    herald.calls[0]()
    assert woken == [1]
