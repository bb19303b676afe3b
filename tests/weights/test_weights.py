"""From publisher to puller over real gRPC: verified, resumable, never a guess."""

from dataclasses import replace

import numpy as np
import pytest

from astraflow.codec.chunks import Chunk
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.core.versions import Source, SourceKind, SourceState
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.puller import WeightPuller
from astraflow.weights.server import WeightServer
from astraflow.weights.store import StoredPatch

TOKEN = b"transfer"
POLICY = PolicyId("solver")
LAYOUT = Layout.of([("a", Dtype.BF16, (300, 40)), ("b", Dtype.F32, (77,)), ("c", Dtype.BF16, ())])


class Training:
    """A publisher whose weights move a little with each version."""

    def __init__(self, seed=0, keep_patches=16):
        self.rng = np.random.default_rng(seed)
        self.publisher = WeightPublisher(POLICY, LAYOUT, keep_patches=keep_patches)
        self.tensors = {
            spec.name: self.rng.integers(0, 1 << 15, spec.shape).astype(spec.dtype.bits)
            for spec in LAYOUT.tensors
        }
        self.infos = {}

    def publish(self, endpoints=(), share=0.02):
        version = len(self.infos)
        for name, bits in self.tensors.items():
            moved = self.rng.random(bits.shape) < share
            self.tensors[name] = (bits + moved).astype(bits.dtype)
        info = self.publisher.publish(version, self.tensors, step=version)
        sources = [
            Source(kind=SourceKind.ORIGIN, state=SourceState.LIVE, endpoint=each)
            for each in endpoints
        ]
        self.infos[version] = replace(info, sources=tuple(sources))
        return self.infos[version]


def live(update, tensors=None):
    """Apply an update as an engine would."""
    tensors = {} if tensors is None else {name: bits.copy() for name, bits in tensors.items()}
    for each in update.tensors:
        if each.indices is None:
            tensors[each.spec.name] = each.values.reshape(each.spec.shape)
        else:
            tensors[each.spec.name].reshape(-1)[each.indices] = each.values
    return tensors


def same(left, right):
    return left.keys() == right.keys() and all((left[n] == right[n]).all() for n in left)


@pytest.fixture
def training():
    return Training()


@pytest.fixture
def server(training):
    with WeightServer(training.publisher) as server:
        server.set_transfer_token(TOKEN)
        yield server


@pytest.fixture
async def puller():
    puller = WeightPuller(POLICY)
    yield puller
    await puller.close()


async def test_versions_arrive_bit_by_bit_first_whole_then_as_patches(training, server, puller):
    engine = {}
    for _ in range(4):
        info = training.publish([server.endpoint])
        pulled = await puller.pull(info, training.infos, TOKEN)
        engine = live(pulled.update, engine)
        assert same(engine, training.tensors)
        assert puller.version == pulled.update.version == info.version
    assert pulled.update.base_version == 2
    assert pulled.nbytes < LAYOUT.nbytes / 4
    assert same(live(puller.full_update()), training.tensors)


async def test_a_reader_that_is_behind_catches_up_by_a_chain(training, server, puller):
    first = await puller.pull(training.publish([server.endpoint]), training.infos, TOKEN)
    for _ in range(5):
        info = training.publish([server.endpoint])
    pulled = await puller.pull(info, training.infos, TOKEN)
    assert pulled.update.base_version == 0
    assert pulled.nbytes < LAYOUT.nbytes
    assert same(live(pulled.update, live(first.update)), training.tensors)


async def test_when_everything_changed_the_whole_is_smaller_than_a_chain(training, server, puller):
    await puller.pull(training.publish([server.endpoint]), training.infos, TOKEN)
    for _ in range(3):
        info = training.publish([server.endpoint], share=1.0)
        training.tensors["a"] = training.rng.integers(0, 1 << 15, (300, 40)).astype(np.uint16)
    pulled = await puller.pull(info, training.infos, TOKEN)
    assert pulled.update.base_version is None
    assert pulled.nbytes <= LAYOUT.nbytes


async def test_a_version_that_is_no_longer_kept_is_an_error_with_a_reason(server, training, puller):
    infos = [training.publish([server.endpoint]) for _ in range(4)]
    with pytest.raises(AstraflowError) as error:
        await puller.pull(infos[0], training.infos, TOKEN)
    assert error.value.reason is Reason.VERSION_EVICTED
    with pytest.raises(AstraflowError) as error:
        await puller.pull(replace(infos[0], version=9), training.infos, TOKEN)
    assert error.value.reason is Reason.VERSION_UNKNOWN


async def test_without_the_token_of_the_run_nothing_is_served(training, server, puller):
    info = training.publish([server.endpoint])
    with pytest.raises(AstraflowError) as error:
        await puller.pull(info, training.infos, b"wrong")
    assert error.value.reason is Reason.TOKEN_INVALID


def spoil(store, change):
    """Make a source lie about the bytes of its newest patches."""
    for shelf in (store._forward, store._full):
        for version, patch in shelf.items():
            first, *rest = patch.chunks
            shelf[version] = StoredPatch(index=patch.index, chunks=(change(first), *rest))


def flipped(chunk):
    payload = bytearray(chunk.payload)
    payload[len(payload) // 2] ^= 1
    return Chunk(header=chunk.header, payload=bytes(payload))


async def test_a_lying_source_costs_a_retry_from_the_next_and_is_reported(training, puller):
    honest, liar = training, Training()
    with WeightServer(honest.publisher) as good, WeightServer(liar.publisher) as bad:
        good.set_transfer_token(TOKEN)
        bad.set_transfer_token(TOKEN)
        info = honest.publish([bad.endpoint, good.endpoint])
        liar.publish()
        spoil(liar.publisher.store, flipped)
        pulled = await puller.pull(info, honest.infos, TOKEN)
    assert same(live(pulled.update), honest.tensors)
    assert [report.bad_chunk_count for report in pulled.reports] == [1, 0]
    assert pulled.reports[0].failure.reason is Reason.DIGEST_MISMATCH


async def test_what_is_held_survives_a_version_that_cannot_be_verified(training, server, puller):
    await puller.pull(training.publish([server.endpoint]), training.infos, TOKEN)
    held = live(puller.full_update())
    info = training.publish([server.endpoint])
    spoil(training.publisher.store, flipped)
    with pytest.raises(AstraflowError) as error:
        await puller.pull(info, training.infos, TOKEN)
    assert error.value.reason is Reason.DIGEST_MISMATCH
    assert puller.version == 0
    assert same(live(puller.full_update()), held)


async def test_a_patch_that_the_run_did_not_register_is_refused(training, server, puller):
    info = training.publish([server.endpoint])
    stranger = Training(seed=7).publish()
    with pytest.raises(AstraflowError) as error:
        await puller.pull(replace(info, patches=stranger.patches), {}, TOKEN)
    assert error.value.reason is Reason.DIGEST_MISMATCH


async def test_a_base_that_is_not_what_it_seems_is_found_and_given_up(training, server, puller):
    await puller.pull(training.publish([server.endpoint]), training.infos, TOKEN)
    puller._held.flat[5] ^= 1
    info = training.publish([server.endpoint])
    puller._held._digest = puller._held._digest.changed([])
    with pytest.raises(AstraflowError, match="not version 1"):
        wrong = replace(info, content_digest=bytes(16))
        await puller.pull(wrong, {1: wrong}, TOKEN)
    pulled = await puller.pull(info, training.infos, TOKEN)
    assert pulled.update.base_version is None
    assert same(live(pulled.update), training.tensors)


async def test_a_source_that_is_gone_is_reported_and_the_next_one_taken(training, server, puller):
    info = training.publish(["127.0.0.1:9", server.endpoint])
    pulled = await puller.pull(info, training.infos, TOKEN)
    assert [report.failure is None for report in pulled.reports] == [False, True]


def test_versions_grow_by_one_and_tensors_fit_the_layout(training):
    training.publish()
    with pytest.raises(AstraflowError) as error:
        training.publisher.publish(2, training.tensors)
    assert error.value.metadata["next_version"] == "1"
    with pytest.raises(AstraflowError, match="tensor b"):
        training.publisher.publish(1, {**training.tensors, "b": np.zeros(3, np.uint32)})
    with pytest.raises(AstraflowError, match="differ in c"):
        training.publisher.publish(1, {n: t for n, t in training.tensors.items() if n != "c"})


def test_patches_beyond_those_kept_are_forgotten():
    training = Training(keep_patches=2)
    for _ in range(6):
        training.publish()
    assert len(training.publisher.store._forward) == 2
    assert len(training.publisher.store._full) == 2
