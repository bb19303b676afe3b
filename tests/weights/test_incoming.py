"""Whatever arrives is what the run registered, or is refused."""

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.core.errors import AstraflowError, Reason
from astraflow.weights.patches.incoming import IncomingVersion, PipelinedDecoder
from astraflow.weights.patches.patch import make_patch
from astraflow.wire.transfers import TransferPlan
from astraflow.wire.weights import SentChunk, decode_sent_chunk, encode_sent_chunk
from astraflow_proto.weights.v1 import patch_pb2

REFUSALS = {Reason.DIGEST_MISMATCH, Reason.CHUNK_INVALID, Reason.INVALID_FIELD}


def plan_of(way):
    return TransferPlan(
        patches=tuple(patch.index for patch in way),
        chunk_count=sum(patch.info.chunk_count for patch in way),
        payload_nbytes=sum(patch.info.payload_nbytes for patch in way),
    )


def sent_of(training, way):
    return [
        SentChunk(patch_index=number, chunk=chunk)
        for number, patch in enumerate(way)
        for chunk in training.chunks_of(patch)
    ]


@pytest.fixture
def chain(training):
    for _ in range(3):
        training.publish()
    return training.plan(2, 0)


@pytest.fixture
def incoming(training, chain):
    incoming = IncomingVersion(training.infos[2], training.infos, base_version=0)
    incoming.take(plan_of(chain), training.store.frame)
    return incoming


def test_a_source_is_told_of_the_cores_that_decode_not_of_all(training, incoming, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    decoder = PipelinedDecoder()
    assert incoming.spec().core_count == decoder._threads._max_workers
    decoder.close()


def test_chunks_may_come_in_any_order_and_twice(training, chain, incoming):
    for each in [*sent_of(training, chain)[::-1], *sent_of(training, chain)]:
        incoming.take(each, training.store.frame)
    incoming.require_complete()

    assert [each.info for each in incoming.planned] == [patch.info for patch in chain]
    assert incoming.nbytes == plan_of(chain).payload_nbytes
    assert incoming.chunk_count == len(sent_of(training, chain))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_flipped_bit_of_a_chunk_message_passes(training, chain, incoming, data):
    sent = data.draw(st.sampled_from(sent_of(training, chain)))
    wire = bytearray(encode_sent_chunk(sent).SerializeToString())
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] ^= 1 << data.draw(st.integers(0, 7))
    taken = incoming.chunk_count
    try:
        spoilt = decode_sent_chunk(patch_pb2.Chunk.FromString(bytes(wire)))
    except Exception:  # noqa: BLE001 - gRPC refuses what is no message, whatever protobuf raises
        return
    # Nothing is wrong with an unknown field, nor with what is the same in both patches.
    if spoilt == sent or (spoilt.chunk == sent.chunk and not sent.chunk.payload):
        return

    with pytest.raises(AstraflowError) as caught:
        incoming.take(spoilt, training.store.frame)

    assert caught.value.reason in REFUSALS
    assert incoming.chunk_count == taken
    assert incoming.bad_chunk_count


def test_what_is_missing_is_missed(training, chain, incoming):
    for each in sent_of(training, chain)[:-1]:
        incoming.take(each, training.store.frame)

    with pytest.raises(AstraflowError, match="1 chunks before the end of version 2"):
        incoming.require_complete()


def test_without_a_plan_nothing_is_complete(training, chain):
    incoming = IncomingVersion(training.infos[2], training.infos, base_version=0)

    with pytest.raises(AstraflowError, match="without a plan"):
        incoming.require_complete()
    with pytest.raises(AstraflowError, match="of no patch"):
        incoming.take(sent_of(training, chain)[0], training.store.frame)


def test_a_second_plan_is_refused(training, chain, incoming):
    with pytest.raises(AstraflowError, match="one plan"):
        incoming.take(plan_of(chain), training.store.frame)


def test_a_plan_from_another_base_is_refused(training):
    for _ in range(3):
        training.publish()
    for way in (training.plan(2, 1), training.plan(2, None)):
        incoming = IncomingVersion(training.infos[2], training.infos, base_version=0)
        with pytest.raises(AstraflowError, match="starts from"):
            incoming.take(plan_of(way), training.store.frame)


def test_roots_are_trusted_from_the_run_alone(training, chain):
    """The plan names a patch with its own, consistent root; the run told of another."""
    lies = [
        replace(chain[-1].index.patch, root_digest=bytes(32)),
        replace(chain[-1].index.patch, payload_nbytes=1),
        replace(chain[-1].index.patch, version=3),
    ]
    for patch in lies:
        incoming = IncomingVersion(training.infos[2], training.infos, base_version=1)
        plan = replace(plan_of(chain), patches=(replace(chain[-1].index, patch=patch),))
        with pytest.raises(AstraflowError) as caught:
            incoming.take(plan, training.store.frame)
        assert caught.value.reason is Reason.PATCH_UNKNOWN


def test_chunks_of_patches_that_left_the_plan_are_let_go(training, chain, incoming):
    for each in sent_of(training, chain):
        incoming.take(each, training.store.frame)
    training.add(make_patch(training.publisher.history, None, 2))
    later = IncomingVersion(
        training.infos[2], training.infos, base_version=None, leftover=incoming.chunks
    )

    assert {each.root_digest for each in later.spec().have_chunks} == {p.root for p in chain}
    later.take(plan_of(training.plan(2, None)), training.store.frame)
    assert not later.spec().have_chunks
