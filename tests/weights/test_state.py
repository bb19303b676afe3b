"""A version is staged beside the held one, which does not move before all is verified."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.codec.changes import Change
from astraflow.codec.chunks import ChunkHeader, Encoding
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.weights.patches.layouts import Shard
from astraflow.weights.patches.patch import Patch
from astraflow.weights.patches.state import Overlay, stage
from astraflow.weights.publish.publisher import WeightPublisher, combined
from astraflow.wire.transfers import TransferSpec


def way(training, version, base):
    return [training.complete(patch) for patch in training.plan(version, base)]


def digests(training):
    return {version: info.content_digest for version, info in training.infos.items()}


def staged(training, held, version):
    base = held and held.version
    return stage(training.store.frame, held, way(training, version, base), digests(training))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 99),
    shares=st.lists(st.sampled_from([0, 0.01, 0.3]), min_size=1, max_size=5),
)
def test_a_chain_leads_to_the_same_bits_as_the_whole_version(tools, seed, shares):
    training = tools.training(seed=seed)
    training.publish()
    held = staged(training, None, 0).commit()
    for share in shares:
        training.publish(share=share)
    newest = len(shares)

    chained = staged(training, held, newest)
    before = held.flat.copy()
    assert (held.flat == before).all()
    state = chained.commit()

    whole = staged(training, None, newest).commit()
    assert (state.flat == whole.flat).all()
    assert state.digest == whole.digest
    assert state.version == newest


@pytest.mark.parametrize("share", [0.001, 0.1])
def test_what_changed_several_times_on_the_way_is_told_once(tools, share):
    training = tools.training(Layout.of([("w", Dtype.U8, (1 << 17,))]))
    training.publish()
    held = staged(training, None, 0).commit()
    before, touched = training.tensors["w"], np.zeros(1 << 17, np.bool_)
    for _ in range(3):
        training.publish(share=share)
        touched |= training.tensors["w"] != before
        before = training.tensors["w"]
    chained = staged(training, held, 3)
    chained.commit()
    (update,) = chained.tensor_updates()
    assert (update.indices == np.flatnonzero(touched)).all()
    assert (update.values == before[touched]).all()


def test_on_the_way_from_nothing_nobody_gathers_what_changed(tools):
    training = tools.training(Layout.of([("w", Dtype.U8, (1 << 20,))]))
    training.publish()
    first = way(training, 0, None)
    held = staged(training, None, 0).commit()
    for _ in range(8):
        training.publish(share=0.1)
    peaks, chain = [], way(training, 8, 0)
    for base, steps in ((held, chain), (None, [*first, *chain])):
        tracemalloc.start()
        stage(training.store.frame, base, steps, digests(training))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 0.6 * peaks[0]


def test_staging_touches_nothing(training):
    training.publish()
    held = staged(training, None, 0).commit()
    before = held.flat.copy()
    for _ in range(3):
        training.publish()
    held.flat.flags.writeable = False

    staged(training, held, 3)

    assert (held.flat == before).all()


def test_a_wrong_state_anywhere_in_a_chain_is_found(training):
    training.publish()
    held = staged(training, None, 0).commit()
    for _ in range(3):
        training.publish()
    for version in (1, 2, 3):
        registered = {**digests(training), version: bytes(16)}
        with pytest.raises(AstraflowError, match=f"not version {version}") as caught:
            stage(training.store.frame, held, way(training, 3, 0), registered)
        assert caught.value.reason is Reason.DIGEST_MISMATCH


def test_a_patch_on_a_wrong_base_is_found(training, tools):
    training.publish()
    other = tools.training(seed=5)
    other.publish()
    stranger = staged(other, None, 0).commit()
    training.publish()

    with pytest.raises(AstraflowError, match="not version 1"):
        staged(training, stranger, 1)


def test_the_update_names_only_what_changed(training):
    training.publish()
    held = staged(training, None, 0).commit()
    name, bits = "a", training.tensors["a"].copy()
    bits[7, 3] ^= 1
    training.tensors[name] = bits
    training.publish(share=0)

    update = staged(training, held, 1)
    update.commit()
    (tensor,) = update.tensor_updates()

    assert (tensor.spec.name, tensor.indices.tolist()) == ("a", [7 * 40 + 3])
    assert tensor.values.tolist() == [bits[7, 3]]


def test_a_tensor_of_which_most_changed_comes_whole(training):
    training.publish()
    held = staged(training, None, 0).commit()
    training.publish(share=0.8)

    update = staged(training, held, 1)
    update.commit()

    assert all(tensor.indices is None for tensor in update.tensor_updates() if tensor.spec.shape)


def test_an_overlay_shows_the_newest_bits_of_any_range():
    """Ranges of later patches need not be those of earlier ones."""
    rng = np.random.default_rng(0)
    flat = rng.integers(0, 256, 4096).astype(np.uint8)
    overlay, expected = Overlay(flat), flat.copy()
    for _ in range(3):
        layer, start = [], 0
        while start < 2000:
            end = min(start + int(rng.integers(50, 600)), 2048)
            indices = np.flatnonzero(rng.random(end - start) < 0.2).astype(np.uint32)
            values = rng.integers(0, 1 << 16, len(indices)).astype(np.uint16)
            if len(indices):
                bits = {"before": values, "values": values}
                layer.append(Change(dtype=Dtype.BF16, first=start, indices=indices, **bits))
            start = end
        for change in layer:
            change.apply(expected)
        overlay.add(layer)

        for offset, nbytes in ((0, 4096), (64, 2), (1000, 800), (4000, 96), (2, 4094)):
            header = ChunkHeader(
                index=0, offset=offset, nbytes=nbytes, dtype=Dtype.BF16, encoding=Encoding.DENSE
            )
            wanted = expected[offset : offset + nbytes].view(np.uint16)
            assert (overlay.bits(header) == wanted).all()


class TestShards:
    """What every rank of a trainer published for itself becomes one version."""

    @pytest.fixture
    def ranks(self, training):
        return [
            WeightPublisher("p", training.layout, shard=Shard(rank=rank, count=3))
            for rank in range(3)
        ]

    def step(self, ranks, training, version):
        training.publish()
        infos = [rank.publish(version, training.tensors) for rank in ranks]
        base_version = version - 1 if version else None
        asked = TransferSpec(policy_id="p", version=version, base_version=base_version)
        patches = [rank.store.plan(asked)[0] for rank in ranks]
        complete = [
            Patch(
                patch.index,
                {n: rank.store.chunk(patch.info, n) for n in range(patch.info.chunk_count)},
            )
            for rank, patch in zip(ranks, patches, strict=True)
        ]
        return complete, combined(infos).content_digest

    def test_they_are_staged_together(self, ranks, training):
        frame, held = training.store.frame, None
        for version in range(3):
            step, digest = self.step(ranks, training, version)
            held = stage(frame, held, step, {version: digest}).commit()

            assert (held.flat == training.flat()).all()

    def test_a_shard_that_is_missing_or_comes_twice_is_found(self, ranks, training):
        frame = training.store.frame
        step, digest = self.step(ranks, training, 0)
        for wrong in (step[:2], step[1:], [step[0], step[2]], [*step, step[1]]):
            with pytest.raises(AstraflowError) as caught:
                stage(frame, None, wrong, {0: digest})
            assert caught.value.reason is Reason.CHUNK_INVALID
