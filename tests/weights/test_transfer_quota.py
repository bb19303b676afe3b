"""What one source may send in one transfer."""

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.weights.fetch.sources import TransferQuota
from astraflow.wire.transfers import TransferPlan
from astraflow.wire.weights import SentChunk


@pytest.fixture
def plan(training):
    training.publish()
    index = training.store.plan(0, None)[0].index
    return TransferPlan(transfer_id="t", patches=(index,), chunk_count=1, payload_nbytes=0)


@pytest.fixture
def chunk(training, plan):
    return SentChunk(patch_index=0, chunk=training.store.chunk(plan.patches[0].patch, 0))


def test_every_chunk_may_come_twice_and_no_more(plan, chunk):
    ration = TransferQuota()
    ration.take(plan)
    for _ in range(2 * len(plan.patches[0].chunk_digests)):
        ration.take(chunk)
    with pytest.raises(AstraflowError, match="more than") as caught:
        ration.take(chunk)
    assert caught.value.reason is Reason.CHUNK_INVALID


def test_plans_without_end_are_refused(plan):
    ration = TransferQuota()
    with pytest.raises(AstraflowError):
        [ration.take(plan) for _ in range(1000)]


def test_chunks_without_a_plan_are_refused(chunk):
    ration = TransferQuota()
    ration.take(chunk)
    with pytest.raises(AstraflowError):
        ration.take(chunk)
