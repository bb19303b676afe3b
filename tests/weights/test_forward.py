"""Forward patches: the same bytes from any number of threads; old versions stay readable."""

import numpy as np
import pytest
import torch

from astraflow.codec.encode import encode_patch
from astraflow.codec.state_digest import StateDigest
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.weights.patches.history import History
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.publish.background import ExtraPatches
from astraflow.weights.publish.publisher import WeightPublisher, thread_count_for
from astraflow.weights.publish.tensors import Exported, Reads

# Ranges of one tensor, of several, and of some that torch rounds.
LAYOUT = Layout.of(
    [("a", Dtype.BF16, (1300, 1000)), ("b", Dtype.BF16, (900, 1000)), ("c", Dtype.F32, (77, 3))]
)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in LAYOUT.tensors}


def moved(given: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    found = {name: each.clone() for name, each in given.items()}
    found["a"].view(-1)[step::97] *= 1.5
    found["c"] += step
    return found


@pytest.mark.parametrize("thread_count", [1, 3])
def test_bytes_do_not_depend_on_threads(thread_count):
    part, old = ShardLayout(LAYOUT), tensors(0)
    history = History(part)
    digest = history.start(0, Exported(part, Reads(part).of(old)).bits)
    new = moved(old, 1)

    found = encode_patch(
        part,
        Exported(part, Reads(part).of(new)).bits,
        history.newest_bits,
        digest,
        thread_count=thread_count,
    )

    wanted = encode_patch(
        part, Exported(part, Reads(part).of(new)).bits, history.newest_bits, digest
    )
    assert [each.header for each in found.chunks] == [each.header for each in wanted.chunks]
    assert [bytes(a.payload) for a in found.chunks] == [bytes(b.payload) for b in wanted.chunks]
    assert found.digest == wanted.digest != StateDigest()


@pytest.mark.parametrize("is_settled", [True, False])
def test_every_version_reads_as_it_was_published(is_settled):
    publisher = WeightPublisher(PolicyId("p"), LAYOUT, thread_count=2)
    given = [tensors(0)]
    for step in range(1, 4):
        given.append(moved(given[-1], step))
    for version, each in enumerate(given):
        publisher.publish(version, each)
        if is_settled:
            publisher.flush()

    part = ShardLayout(LAYOUT)
    for version in (3, 0, 2, 1):
        wanted, found = (
            Exported(part, Reads(part).of(given[version])).bits,
            publisher.history.bits_of(version),
        )
        assert all(np.array_equal(found(each), wanted(each)) for each in part.ranges())


def test_a_thread_is_for_many_bytes():
    assert thread_count_for(1 << 20) == 1
    assert 1 <= thread_count_for(1 << 34) <= 4


@pytest.mark.slow
def test_what_is_written_late_is_never_compared_with_half_written():
    layout = Layout.of([("w", Dtype.BF16, (4 << 20,))])
    weights = np.arange(4 << 20, dtype=np.uint16)
    publisher = WeightPublisher(PolicyId("p"), layout)
    with ExtraPatches(publisher, lambda info: info, time_share=0.0) as gains:
        for version in range(30):
            weights[version::3] += 1
            info = publisher.publish(version, {"w": weights})
            gains.wake()
            assert info.content_digest == StateDigest.of(layout, weights.view(np.uint8)).to_bytes()
    ranges = ShardLayout(layout).ranges()
    assert np.array_equal(np.concatenate([*map(publisher.history.newest_bits, ranges)]), weights)
