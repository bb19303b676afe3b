from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import (
    CodecProfile,
    PatchInfo,
    SourceInfo,
    SourceKind,
    SourceState,
    VersionInfo,
    VersionLedger,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def info(version, *, content=None, patches=(), sources=()):
    return VersionInfo(
        policy_id="solver",
        version=version,
        layout_digest=b"layout",
        content_digest=content or bytes([version]),
        patches=patches,
        sources=sources,
    )


def patch(base, nbytes):
    return PatchInfo(
        base_version=base,
        version=1,
        profile=CodecProfile.FAST,
        codec_version=1,
        root_digest=b"",
        chunk_count=1,
        payload_nbytes=nbytes,
    )


@pytest.fixture
def ledger():
    return VersionLedger("solver", kept_count=3)


def reason_of(call, *arguments):
    with pytest.raises(AstraflowError) as caught:
        call(*arguments)
    return caught.value.reason


def test_weights_that_are_published_again_have_no_number_of_their_own(ledger):
    for version, content in enumerate([b"a", b"b", b"b", b"c", b"b", b"b"]):
        ledger.publish(info(version, content=content), NOW)
    assert [ledger.weights_number(version) for version in range(8)] == [0, 1, 1, 2, 3, 3, 4, 5]
    assert [ledger.oldest_with(number) for number in range(6)] == [0, 1, 3, 4, 6, 7]


@given(st.lists(st.sampled_from([b"a", b"b"]), max_size=30))
def test_the_oldest_version_of_weights_is_the_first_of_their_number(contents):
    ledger = VersionLedger("solver", kept_count=3)
    for version, content in enumerate(contents):
        ledger.publish(info(version, content=content), NOW)
    numbers = [ledger.weights_number(version) for version in range(len(contents) + 5)]
    assert numbers == sorted(numbers)
    for number in set(numbers):
        assert ledger.oldest_with(number) == numbers.index(number)


def test_versions_grow_by_one(ledger):
    assert ledger.newest is None
    assert ledger.publish(info(0), NOW)
    assert reason_of(ledger.publish, info(2), NOW) is Reason.VERSION_NOT_NEXT
    assert ledger.publish(info(1), NOW)
    assert ledger.newest.publish_time == NOW
    assert ledger.next_version == 2


def test_version_has_one_content_for_ever(ledger):
    ledger.publish(info(0), NOW)
    assert not ledger.publish(info(0), NOW)
    assert reason_of(ledger.publish, info(0, content=b"x"), NOW) is Reason.REQUEST_CONFLICT


def test_repeat_adds_patches_smallest_first(ledger):
    ledger.publish(info(0, patches=(patch(None, 9),)), NOW)
    assert ledger.publish(info(0, patches=(patch(3, 2),)), NOW)
    assert [p.payload_nbytes for p in ledger.get(0).patches] == [2, 9]


def test_old_versions_are_no_longer_listed(ledger):
    for version in range(5):
        ledger.publish(info(version), NOW)
        ledger.show(version)
    assert [listed.version for listed in ledger.listed] == [2, 3, 4]
    assert reason_of(ledger.get, 1) is Reason.VERSION_EVICTED
    assert reason_of(ledger.get, 5) is Reason.VERSION_UNKNOWN


def test_another_layout_is_another_model(ledger):
    ledger.publish(info(0), NOW)
    other = replace(info(1), layout_digest=b"other")
    assert reason_of(ledger.publish, other, NOW) is Reason.LAYOUT_MISMATCH


def test_a_version_gains_the_object_store_that_it_was_written_to(ledger):
    store = SourceInfo(
        kind=SourceKind.OBJECT_STORE, state=SourceState.LIVE, uri="s3://b/run/solver/0"
    )
    ledger.publish(info(0, patches=(patch(None, 100),)), NOW)
    assert ledger.publish(info(0, sources=(store,)), NOW)
    assert ledger.get(0).sources == (store,)
    assert len(ledger.get(0).patches) == 1
    assert not ledger.publish(info(0, sources=(store,)), NOW)
