"""What is kept is bounded, and the way of the fewest bytes is found in it."""

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.weights.store import PatchStore
from astraflow.wire.patches import ChunkSet


def published(training, count, *, keep=16, spare_nbytes=64 << 20, **how):
    store = PatchStore(training.store.frame, keep=keep, spare_nbytes=spare_nbytes)
    training.publisher.store = store
    for _ in range(count):
        training.publish(**how)
    return store


def route(way):
    return [(patch.info.base_version, patch.info.version) for patch in way]


def refusal(store, version, base_version):
    with pytest.raises(AstraflowError) as caught:
        store.plan(version, base_version)
    return caught.value.reason


class TestPlan:
    def test_from_a_base_it_is_the_chain(self, training):
        store = published(training, 5)

        assert route(store.plan(4, 1)) == [(1, 2), (2, 3), (3, 4)]
        assert route(store.plan(2, 1)) == [(1, 2)]

    def test_from_nothing_it_is_the_whole_version(self, training):
        store = published(training, 3)

        assert route(store.plan(2, None)) == [(None, 2)]
        assert route(store.plan(1, None)) == [(None, 1)]

    def test_from_nothing_it_builds_on_what_the_reader_has_already(self, training):
        store = published(training, 3)
        (whole,) = store.plan(1, None)
        have = {whole.root: ChunkSet.of(whole.root, range(len(whole.chunks) - 1))}

        assert route(store.plan(2, None, have)) == [(None, 1), (1, 2)]

    def test_versions_that_never_were_are_unknown(self, training):
        store = published(training, 3)

        assert refusal(store, 3, None) is Reason.VERSION_UNKNOWN
        assert refusal(store, -1, None) is Reason.VERSION_UNKNOWN

    def test_nothing_leads_back(self, training):
        store = published(training, 3)

        assert refusal(store, 1, 2) is Reason.PATCH_UNKNOWN
        assert refusal(store, 2, 2) is Reason.PATCH_UNKNOWN

    def test_a_step_that_was_not_worth_a_patch_breaks_the_chain(self, training):
        store = published(training, 3)
        training.publish(share=1, is_noise=True)
        training.publish()

        assert refusal(store, 4, 1) is Reason.VERSION_EVICTED
        assert route(store.plan(4, 3)) == [(3, 4)]


class TestBounds:
    def test_the_last_forward_patches_are_kept(self, training):
        store = published(training, 6, keep=2)

        assert route(store.plan(5, 3)) == [(3, 4), (4, 5)]
        assert refusal(store, 5, 2) is Reason.VERSION_EVICTED

    def test_of_large_models_one_whole_version_is_kept(self, training):
        store = published(training, 6, spare_nbytes=0)

        assert route(store.plan(5, None)) == [(None, 5)]
        assert refusal(store, 4, None) is Reason.VERSION_EVICTED

    def test_forward_patches_never_take_more_than_a_whole_version(self, training):
        store = published(training, 12, spare_nbytes=0, share=0.2, is_noise=True)

        assert store.nbytes <= 2 * training.layout.nbytes
        assert route(store.plan(11, 10)) == [(10, 11)]
        assert refusal(store, 11, 0) is Reason.VERSION_EVICTED

    def test_one_whole_version_stays_while_it_is_read(self, training):
        store = published(training, 1, spare_nbytes=0)
        (whole,) = store.plan(0, None)
        with store.reading([whole.info]):
            for _ in range(3):
                training.publish()
            assert store.chunk(whole.info, 0) is whole.chunks[0]
        training.publish()

        with pytest.raises(AstraflowError) as caught:
            store.chunk(whole.info, 0)
        assert caught.value.reason is Reason.VERSION_EVICTED

    def test_readers_of_many_versions_hold_one_of_them(self, training):
        store = published(training, 1, spare_nbytes=0)
        for _ in range(5):
            with store.reading([store.plan(training.publisher.version, None)[0].info]):
                training.publish()
            infos = [store.plan(training.publisher.version, None)[0].info]
            reading = store.reading(infos)
            reading.__enter__()
            training.publish()

        assert store.nbytes <= 3 * training.layout.nbytes


def test_a_patch_is_found_by_its_root(training):
    store = published(training, 2)
    (forward,) = store.plan(1, 0)

    assert store.patch(forward.root) is forward
    with pytest.raises(AstraflowError) as caught:
        store.patch(bytes(32))
    assert caught.value.reason is Reason.PATCH_UNKNOWN
