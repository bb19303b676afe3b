"""Versions gain the patches that readers far behind would take, and only after they are known."""

import threading
from dataclasses import replace

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import CodecProfile
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.patches.state import stage
from astraflow.weights.publish.background import FIRST_SPANS, ExtraPatches, candidate_patches
from astraflow.wire.weights import digest_of


def gains_of(training, version, spans):
    patches = [make() for make in candidate_patches(training.publisher, version, spans)]
    return [patch for patch in patches if patch is not None]


def made(training, version, spans):
    gains = gains_of(training, version, spans)
    return [patch for patch in gains if patch.info.base_version is not None]


def route(patches):
    return [(patch.info.base_version, patch.info.version) for patch in patches]


class Run:
    """What a hub would know: it counts announcements, and may be gone."""

    def __init__(self, store):
        self.store, self.infos, self.is_gone = store, [], False
        self.heard = threading.Event()
        self.was_offered_early = False

    def announce(self, info):
        offered = {patch.root for patch in self.store.patches}
        self.was_offered_early |= any(each.root_digest in offered for each in info.patches)
        self.infos.append(info)
        self.heard.set()
        if self.is_gone:
            raise AstraflowError(Reason.NOT_READY, "gone")


def test_one_patch_spans_versions_and_leads_to_the_same_bits(training):
    for _ in range(9):
        training.publish()
    history = training.publisher.history
    for patch in made(training, 8, (8, 3)):
        assert patch.info.payload_nbytes < sum(
            way.info.payload_nbytes for way in training.plan(8, patch.info.base_version)
        )
        training.add(patch)
        again = training.chunks_of(patch)
        assert tuple(map(digest_of, again)) == patch.index.chunk_digests
    for where in history.shard_layout.ranges():
        assert (history.bits_of(8)(where) == history.newest_bits(where)).all()


def test_what_is_not_smaller_than_the_patches_between_is_not_worth_it(training):
    for _ in range(3):
        training.publish(share=0)

    assert route(made(training, 2, (2,))) == []


def test_a_way_of_few_bytes_is_not_worth_another_patch(training):
    for _ in range(9):
        training.publish()
    way = training.plan(8, 0)
    nbytes = sum(patch.info.payload_nbytes for patch in way)

    def composites(worth_nbytes):
        made = [
            make()
            for make in candidate_patches(training.publisher, 8, (8,), worth_nbytes=worth_nbytes)
        ]
        return [patch for patch in made if patch is not None and patch.info.base_version == 0]

    assert len(composites(nbytes)) == 1
    assert composites(nbytes + 1) == []


def test_a_patch_that_is_there_is_not_made_twice(training):
    for _ in range(4):
        training.publish()
    (patch,) = made(training, 3, (2,))
    training.add(patch)

    assert made(training, 3, (2, 1)) == []


def test_spans_beyond_what_is_kept_are_left_out(tools):
    training = tools.training(keep_patches=3)
    for _ in range(8):
        training.publish()

    assert route(made(training, 7, FIRST_SPANS)) == [(5, 7)]


def test_a_version_that_went_back_gains_the_patch_from_where_it_went_to(training):
    for _ in range(3):
        training.publish()
    was = {name: bits.copy() for name, bits in training.tensors.items()}
    for _ in range(2):
        training.publish()
    training.publisher.publish(5, was, restored_from=2)

    (patch,) = made(training, 5, ())
    assert (patch.info.base_version, patch.info.payload_nbytes) == (2, 0)


def test_whole_versions_are_renewed_before_they_are_out_of_reach(tools):
    training = tools.training(keep_patches=4)
    wholes = []
    for version in range(12):
        training.publish()
        for patch in gains_of(training, version, ()):
            training.add(patch)
            wholes.append((patch.info.version, patch.info.profile))

    assert [v for v, profile in wholes if profile is CodecProfile.COMPACT] == [0, 2, 4, 6, 8, 10]
    assert [v for v, profile in wholes if profile is CodecProfile.FAST] == [2, 4, 6, 8, 10]
    assert all(training.infos[version].patches[0].base_version is not None for version in (1, 3))


def test_large_changes_renew_the_whole_version_sooner(training):
    training.publish()
    for _ in range(3):
        training.publish(share=0.2, is_noise=True)

    assert (None, 3) in route(gains_of(training, 3, ()))


class TestThread:
    @pytest.fixture
    def run(self, training):
        return Run(training.store)

    def test_the_run_hears_of_patches_before_readers_get_them(self, training, run):
        for _ in range(5):
            training.publish()
        with ExtraPatches(training.publisher, run.announce, worth_nbytes=0) as gains:
            gains.wake()
            assert run.heard.wait(200)

        assert not run.was_offered_early
        (info, *_) = run.infos
        assert info.content_digest == training.infos[4].content_digest
        assert {patch.base_version for patch in info.patches} >= {0, 2}
        assert route(training.plan(4, 0)) == [(0, 4)]

    def test_a_run_that_is_gone_ends_nothing(self, training, run):
        run.is_gone = True
        for _ in range(3):
            training.publish()
        with ExtraPatches(training.publisher, run.announce, worth_nbytes=0) as gains:
            gains.wake()
            assert run.heard.wait(200)
            run.heard.clear()
            run.is_gone = False
            training.publish()
            gains.wake()
            assert run.heard.wait(200)

        assert route(training.plan(2, 0)) == [(0, 1), (1, 2)]
        assert route(training.plan(3, 1)) == [(1, 3)]

    def test_publishing_goes_on_while_patches_are_made_and_read(self, training, run):
        training.publish()
        known = {}
        with ExtraPatches(training.publisher, run.announce, time_share=1, worth_nbytes=0) as gains:
            for version in range(1, 40):
                known[version] = training.publish().content_digest
                gains.wake()
                for patch in training.plan(version, None):
                    chunks = training.chunks_of(patch)
                    assert tuple(map(digest_of, chunks)) == patch.index.chunk_digests

        assert all(info.content_digest == known[info.version] for info in run.infos)


async def test_who_is_far_behind_pulls_one_patch_and_who_is_new_a_coded_whole(
    training, serve, puller, tools
):
    await serve()
    first = await puller.pull(training.publish(), training.infos, training.token)
    for _ in range(12):
        training.publish()
    for patch in gains_of(training, 12, (12,)):
        training.add(patch)
    pulled = await puller.pull(training.infos[12], training.infos, training.token)
    newcomer = WeightPuller(training.policy_id)
    late = await newcomer.pull(training.infos[12], training.infos, training.token)
    await newcomer.close()

    assert (first.update.base_version, pulled.update.base_version) == (None, 0)
    (one,) = (p for p in training.infos[12].patches if p.base_version == 0)
    assert pulled.nbytes == one.payload_nbytes
    assert training.is_live(tools.live(pulled.update, tools.live(first.update)))
    assert training.is_live(tools.live(late.update))


def test_readers_up_to_sixteen_behind_need_at_most_four_patches_and_never_a_whole_version(tools):
    training = tools.training(Layout.of([("w", Dtype.BF16, (4096,))]))
    held, digests, hops = {}, {}, {}
    for version in range(60):
        digests[version] = training.publish().content_digest
        for patch in gains_of(training, version, FIRST_SPANS):
            training.add(patch)
        base = version - int(training.rng.integers(1, 17))
        state, way = held.get(base), training.plan(version, base if base in held else None)
        if state is not None:
            hops.setdefault(version - base, len(way))
            assert way[0].info.base_version == base
        patches = [training.complete(patch) for patch in way]
        held[version] = stage(training.store.frame, copied(state), patches, digests).commit()

    assert max(hops.values()) <= 4
    assert all(count == 1 for span, count in hops.items() if span in (1, *FIRST_SPANS))


def copied(state):
    """What another reader holds that was there at the same time."""
    return None if state is None else replace(state, flat=state.flat.copy())
