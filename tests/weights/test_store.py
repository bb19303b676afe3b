"""What is kept is bounded, the way of the fewest bytes is found, and chunks are made again."""

from dataclasses import replace

import pytest

from astraflow.codec.rates import DecodeRate
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import CodecProfile
from astraflow.weights.patches import store as patch_store
from astraflow.weights.patches.patch import Patch, make_patch
from astraflow.wire.transfers import ChunkSet, TransferSpec
from astraflow.wire.weights import digest_of


def published(training, count, **how):
    for _ in range(count):
        training.publish(**how)
    return training.store


def asked(version, base_version, **told):
    return TransferSpec(policy_id="solver", version=version, base_version=base_version, **told)


def route(way):
    return [(patch.info.base_version, patch.info.version) for patch in way]


def refusal(store, version, base_version):
    with pytest.raises(AstraflowError) as caught:
        store.plan(asked(version, base_version))
    return caught.value.reason


def kept_nbytes(store):
    """Payload that is kept, and what else undoes old versions."""
    kept = sum(each.info.payload_nbytes for each in store.patches if each.is_kept)
    return max(kept, store.history._sizes.total())


class TestPlan:
    def test_from_a_base_it_is_the_chain(self, training):
        store = published(training, 5)

        assert route(store.plan(asked(4, 1))) == [(1, 2), (2, 3), (3, 4)]
        assert route(store.plan(asked(2, 1))) == [(1, 2)]

    def test_one_patch_over_several_versions_is_taken_where_it_is_smaller(self, training):
        store = published(training, 6)
        training.add(make_patch(training.publisher.history, 1, 5))

        assert route(store.plan(asked(5, 1))) == [(1, 5)]
        assert route(store.plan(asked(5, 0))) == [(0, 1), (1, 5)]
        assert route(store.plan(asked(5, 2))) == [(2, 3), (3, 4), (4, 5)]

    def test_from_nothing_it_is_a_whole_version_and_what_leads_on(self, training):
        store = published(training, 3)

        assert route(store.plan(asked(2, None))) == [(None, 0), (0, 1), (1, 2)]
        training.add(make_patch(training.publisher.history, None, 2))
        assert route(store.plan(asked(2, None))) == [(None, 2)]

    def test_from_nothing_it_builds_on_what_the_reader_has_already(self, training):
        store = published(training, 3)
        (whole,) = store.plan(asked(0, None))
        have = ChunkSet.of(whole.root, range(whole.info.chunk_count - 1))
        training.add(make_patch(training.publisher.history, None, 2))

        assert route(store.plan(asked(2, None))) == [(None, 2)]
        assert route(store.plan(asked(2, None, have_chunks=[have]))) == [(None, 0), (0, 1), (1, 2)]

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
        assert route(store.plan(asked(4, 3))) == [(3, 4)]
        assert route(store.plan(asked(4, None))) == [(None, 3), (3, 4)]

    def test_versions_without_a_change_have_patches_with_the_same_root_and_both_lead_on(
        self, training
    ):
        store = published(training, 1)
        published(training, 2, share=0)

        assert route(store.plan(asked(2, 0))) == [(0, 1), (1, 2)]

    def test_how_far_readers_are_behind_is_noted_the_last_one_first(self, training):
        store = published(training, 6)
        for base in (2, 1, 4, 2):
            store.plan(asked(5, base))

        assert store.requested_spans == (3, 4)

    def test_the_newest_is_had_from_nothing_when_a_reader_of_an_old_one_is_done(self, tools):
        training = tools.training(keep_patches=2)
        store = published(training, 1)
        (whole,) = store.plan(asked(0, None))
        with store.reading([whole.info]):
            published(training, 4)
        # As extra patches of the newest version do.
        store.offer([])

        assert whole not in store.patches
        assert route(store.plan(asked(4, None)))[-1] == (3, 4)


class TestLinks:
    @pytest.fixture
    def store(self, training):
        store = published(training, 2)
        (forward,) = store.plan(asked(1, 0))
        info = replace(
            forward.info,
            profile=CodecProfile.COMPACT,
            payload_nbytes=forward.info.payload_nbytes // 2,
            root_digest=bytes(32),
        )
        store.offer([Patch(replace(forward.index, patch=info))])
        return store

    def profile(self, store, **told):
        (patch,) = store.plan(asked(1, 0, **told))
        return patch.info.profile

    def test_a_slow_link_gets_the_smaller_one_and_a_fast_one_what_decodes_quickly(self, store):
        assert self.profile(store, goodput_bytes_per_s=1e4) is CodecProfile.COMPACT
        assert self.profile(store, goodput_bytes_per_s=1e10) is CodecProfile.FAST

    def test_more_cores_make_the_smaller_one_worth_it(self, store):
        nbytes = store.plan(asked(1, 0, profiles=(CodecProfile.FAST,)))[0].info.payload_nbytes
        # Where both take the same time on one core.
        rates = decode_rates(fast=10e9, compact=4e9)
        slower = 1 / 4e9 - 1 / 10e9
        even = nbytes / 2 / (store.history.shard_layout.payload_nbytes * slower)

        told = {"goodput_bytes_per_s": even * 1.5, "decode_rates": rates}
        assert self.profile(store, **told) is CodecProfile.FAST
        assert self.profile(store, **told, core_count=4) is CodecProfile.COMPACT

    def test_what_the_reader_decodes_quickly_decides(self, store):
        nbytes = store.plan(asked(1, 0, profiles=(CodecProfile.FAST,)))[0].info.payload_nbytes
        model_nbytes = store.history.shard_layout.payload_nbytes
        # The smaller one takes half the time on the link, which is as long as a pass at 1 GB/s.
        goodput = nbytes / (2 * model_nbytes / 1e9)

        for compact, chosen in ((0.9e9, CodecProfile.FAST), (1.2e9, CodecProfile.COMPACT)):
            rates = decode_rates(fast=1e12, compact=compact)
            found = self.profile(store, goodput_bytes_per_s=goodput, decode_rates=rates)
            assert found is chosen

    def test_an_unknown_link_gets_the_fewest_bytes(self, store):
        assert self.profile(store) is CodecProfile.COMPACT

    def test_what_the_reader_prefers_decides(self, store):
        for first, second in ((CodecProfile.FAST, CodecProfile.COMPACT),) * 2:
            assert self.profile(store, profiles=(first, second)) is first
            assert self.profile(store, profiles=(second,)) is second

    def test_a_profile_that_was_never_coded_is_refused(self, training):
        store = published(training, 2)
        with pytest.raises(AstraflowError) as caught:
            store.plan(asked(1, 0, profiles=(CodecProfile.COMPACT,)))
        assert caught.value.reason is Reason.PATCH_UNKNOWN


def decode_rates(**by_profile):
    """Return rates of a reader for which the payload alone takes no time."""
    return tuple(
        DecodeRate(
            profile=CodecProfile(name),
            model_bytes_per_s=rate,
            payload_bytes_per_s=1e15,
            whole_bytes_per_s=rate,
        )
        for name, rate in by_profile.items()
    )


class TestBounds:
    def test_the_last_versions_are_kept(self, tools):
        training = tools.training(keep_patches=2)
        store = published(training, 6)

        assert route(store.plan(asked(5, 3))) == [(3, 4), (4, 5)]
        assert refusal(store, 5, 2) is Reason.VERSION_EVICTED

    def test_a_reader_from_nothing_always_finds_a_way(self, tools):
        training = tools.training(keep_patches=2)
        for version in range(7):
            training.publish()
            assert route(training.plan(version, None))[0][0] is None

    def test_what_is_kept_never_takes_more_than_a_whole_version(self, tools, monkeypatch):
        monkeypatch.setattr(patch_store, "_SPARE_NBYTES", 0)
        training = tools.training()
        store = published(training, 12, share=0.2, is_noise=True)

        assert kept_nbytes(store) <= training.layout.nbytes
        assert route(store.plan(asked(11, 10))) == [(10, 11)]
        assert refusal(store, 11, 0) is Reason.VERSION_EVICTED

    def test_a_version_stays_while_it_is_read(self, tools):
        training = tools.training(keep_patches=2)
        store = published(training, 1)
        (whole,) = store.plan(asked(0, None))
        chunks = training.chunks_of(whole)
        with store.reading([whole.info]):
            published(training, 5)
            assert training.chunks_of(whole) == chunks
        training.publish()

        with pytest.raises(AstraflowError) as caught:
            store.chunk(whole.info, 0)
        assert caught.value.reason is Reason.VERSION_EVICTED

    def test_what_is_kept_for_readers_is_bounded_too(self, tools, monkeypatch):
        monkeypatch.setattr(patch_store, "_SPARE_NBYTES", 0)
        training = tools.training()
        store = published(training, 1)
        (whole,) = store.plan(asked(0, None))
        with store.reading([whole.info]):
            published(training, 12, share=0.2, is_noise=True)

            assert kept_nbytes(store) <= 2 * training.layout.nbytes
            with pytest.raises(AstraflowError):
                store.chunk(whole.info, 0)


class TestChunks:
    def test_those_that_are_made_again_have_the_digests_that_were_registered(self, training):
        store = published(training, 6)
        history = training.publisher.history
        for patch in (
            make_patch(history, 1, 4),
            make_patch(history, None, 3),
            make_patch(history, 0, 5),
        ):
            store.offer([patch])
            training.publish()
            again = training.chunks_of(patch)

            assert tuple(map(digest_of, again)) == patch.index.chunk_digests
