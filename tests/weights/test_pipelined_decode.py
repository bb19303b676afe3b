"""Early decoding: the same changes as decoding in the end, and nothing of it counts unverified."""

import numpy as np
import pytest

from astraflow.codec.decode import decode_change
from astraflow.core.errors import AstraflowError, Reason
from astraflow.weights.patches.incoming import IncomingVersion, PipelinedDecoder
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.state import stage
from astraflow.wire.transfers import TransferPlan
from astraflow.wire.weights import SentChunk


@pytest.fixture
def decoder():
    made = PipelinedDecoder()
    yield made
    made.close()


@pytest.fixture
def pulled(training):
    """The base, the way to the next version, and what a pull of it needs."""
    training.publish()
    training.publish()
    frame = ShardLayout(training.layout)
    whole, patch = training.plan(0, None)[0], training.plan(1, 0)[0]
    digests = {v: info.content_digest for v, info in training.infos.items()}
    base = stage(frame, None, [training.complete(whole)], digests).commit()
    incoming = IncomingVersion(training.infos[1], training.infos, base_version=0)
    return base, patch, incoming, frame, digests


def _chunks(training, patch):
    return tuple(training.store.chunk(patch.info, n) for n in range(patch.info.chunk_count))


def _plan(patch):
    return TransferPlan(
        patches=(patch.index,),
        chunk_count=patch.info.chunk_count,
        payload_nbytes=patch.info.payload_nbytes,
    )


def test_what_was_decoded_early_makes_the_same_state(training, pulled, decoder):
    base, patch, incoming, frame, digests = pulled
    decoder.over(base)
    decoder.begin(incoming, frame)
    incoming.take(_plan(patch), frame)
    for chunk in _chunks(training, patch):
        incoming.take(SentChunk(patch_index=0, chunk=chunk), frame)
        decoder.note()

    early = stage(frame, base, incoming.planned, digests, decoder.decode)

    late = stage(frame, base, incoming.planned, digests)
    assert early.state.digest == late.state.digest
    for a, b in zip(early.tensor_updates(), late.tensor_updates(), strict=True):
        assert np.array_equal(a.indices, b.indices)
        assert np.array_equal(a.values, b.values)


def test_a_base_that_is_another_makes_no_state(training, pulled, decoder):
    base, patch, incoming, frame, digests = pulled
    base.flat[: len(base.flat) // 2] ^= 1
    decoder.over(base)
    decoder.begin(incoming, frame)
    incoming.take(_plan(patch), frame)
    for chunk in _chunks(training, patch):
        incoming.take(SentChunk(patch_index=0, chunk=chunk), frame)
    decoder.note()

    with pytest.raises(AstraflowError) as caught:
        stage(frame, base, incoming.planned, digests, decoder.decode)

    assert caught.value.reason in (Reason.DIGEST_MISMATCH, Reason.CHUNK_INVALID)


def test_what_was_not_submitted_is_decoded_when_it_is_asked_for(training, pulled, decoder):
    base, patch, _, _, _ = pulled
    for chunk in _chunks(training, patch):
        old = base.flat[chunk.header.offset : chunk.header.end].view(chunk.header.dtype.bits)
        found, wanted = decoder.decode(chunk, old), decode_change(chunk, old)
        assert (found is None) == (wanted is None)
        assert found is None or np.array_equal(found.values, wanted.values)
