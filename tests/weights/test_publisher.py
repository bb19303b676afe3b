"""A publisher turns arrays into versions, and says truly what each of them is."""

from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import CodecProfile
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.wire.transfers import TransferSpec
from astraflow.wire.weights import layout_digest


def test_the_first_version_leads_from_nothing_and_the_next_from_it(training):
    first, second = training.publish(), training.publish()

    assert [patch.base_version for patch in first.patches] == [None]
    assert [patch.base_version for patch in second.patches] == [0]
    assert second.patches[0].payload_nbytes < first.patches[0].payload_nbytes
    assert second.layout_digest == layout_digest(training.layout)
    assert (second.version, second.step, second.policy_id) == (1, 1, training.policy_id)


def test_the_state_digest_that_is_kept_current_is_that_of_the_state(training):
    for share in (0.02, 0, 1, 0.3):
        info = training.publish(share=share, is_noise=share == 1)

        assert info.content_digest == StateDigest.of(training.layout, training.flat()).to_bytes()


def test_a_patch_that_saves_nothing_is_left_out(training):
    training.publish()
    info = training.publish(share=1, is_noise=True)

    assert [patch.base_version for patch in info.patches] == [None]


def test_two_publishers_of_the_same_weights_agree_on_every_byte(tools):
    left, right = tools.training(), tools.training()
    for _ in range(3):
        assert left.publish() == right.publish()


def test_what_the_caller_does_to_its_arrays_afterwards_changes_nothing(training):
    info = training.publish()
    for bits in training.tensors.values():
        bits[...] = 0
    (whole,) = training.plan(0, None)

    assert whole.info == info.patches[0]
    assert any(bytes(chunk.payload).strip(b"\0") for chunk in training.chunks_of(whole))


def test_versions_grow_by_one(training):
    training.publish()

    for version in (0, 2, -1):
        with pytest.raises(AstraflowError) as caught:
            training.publisher.publish(version, training.tensors)
        assert caught.value.reason is Reason.VERSION_NOT_NEXT
        assert caught.value.metadata == {"next_version": "1"}
    assert training.publisher.version == 0


def test_a_resumed_training_starts_at_any_version(training):
    info = training.publisher.publish(41, training.tensors, restored_from=36)

    assert (info.version, info.restored_from) == (41, 36)
    assert training.publisher.version == 41


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("c"), "differ in c"),
        (lambda t: t.update(z=np.zeros(1, np.uint16)), "differ in z"),
        (lambda t: t.update(b=np.zeros(3, np.uint32)), r"tensor b has the shape \[3\]"),
        (lambda t: t.update(b=np.zeros(77, np.float64)), "tensor b is float64"),
        (lambda t: t.update(a=np.zeros((40, 300), np.uint16)), "tensor a has the shape"),
        (lambda t: t.update(e="text"), "tensor e "),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_refused_by_name(training, change, words):
    training.publish()
    tensors = dict(training.tensors)
    change(tensors)

    with pytest.raises(AstraflowError, match=words) as caught:
        training.publisher.publish(1, tensors)

    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    assert training.publish().version == 1


def test_a_model_without_bytes_has_versions_too():
    layout = Layout.of([("none", Dtype.F32, (0,))])
    publisher = WeightPublisher("p", layout)
    for version in range(2):
        info = publisher.publish(version, {"none": np.zeros(0, np.uint32)})

    assert info.patches[0].chunk_count == 0


def test_a_version_for_readers_on_slow_links_comes_compact_at_once():
    layout = Layout.of([("w", Dtype.BF16, (1 << 20,))])
    publisher = WeightPublisher("p", layout)
    rng, bits = np.random.default_rng(0), np.full(1 << 20, 0x3C00, np.uint16)
    for version in range(3):
        bits[rng.integers(0, 1 << 20, 30_000)] += np.uint16(1)
        info = publisher.publish(version, {"w": bits})
        if version:
            asked = TransferSpec(policy_id="p", version=version, base_version=version - 1)
            publisher.store.plan(replace(asked, goodput_bytes_per_s=1e5, core_count=2))

    profiles = [patch.profile for patch in info.patches]
    assert profiles == [CodecProfile.COMPACT, CodecProfile.FAST]
    assert info.patches[0].payload_nbytes < info.patches[1].payload_nbytes


def test_where_the_time_went_is_logged(training):
    with capture_logs() as logs:
        training.publish()
        training.publish()

    first, second = (entry for entry in logs if entry["event"] == "a version was encoded")
    assert first.keys() >= {"copy_s", "whole_s", "gather_s"}
    assert second.keys() >= {"encode_s", "digest_s", "advance_s", "gather_s", "patch_nbytes"}
