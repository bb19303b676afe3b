"""From publisher to puller over real gRPC: verified, resumable, never a guess."""

import asyncio
import tracemalloc
from dataclasses import replace

import pytest

from astraflow.codec.chunks import CHUNK_NBYTES
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import CodecProfile
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.weights.fetch.puller import PullFailed, WeightPuller
from astraflow.weights.fetch.sources import FetchSettings
from astraflow.weights.heartbeat import StallTimeouts
from astraflow.weights.patches.patch import make_patch
from astraflow.weights.serve.relay import WeightRelay
from astraflow.wire.weights import encode_patch_index

# More changes per version than are written at once.
WIDE = Layout.of([("w", Dtype.U8, (1 << 19,))])
BIG = Layout.of([("w", Dtype.U8, (5 * CHUNK_NBYTES // 2,)), ("x", Dtype.BF16, (1000,))])


async def pull(puller, training, info):
    return await puller.pull(info, training.infos, training.token)


async def refused(puller, training, info, reason):
    error = await caught(puller, training, info)
    assert error.reason is reason
    return error


async def caught(puller, training, info):
    with pytest.raises(PullFailed) as failure:
        await pull(puller, training, info)
    return failure.value


class TestGoodCase:
    async def test_versions_arrive_bit_by_bit_first_whole_then_as_patches(
        self, training, serve, puller, tools
    ):
        source, engine = await serve(), None
        for _ in range(4):
            info = training.publish()
            pulled = await pull(puller, training, info)
            engine = tools.live(pulled.update, engine)
            assert training.is_live(engine)
            assert puller.version == pulled.update.version == info.version
        assert pulled.update.base_version == 2
        assert pulled.nbytes == info.patches[0].payload_nbytes < training.layout.nbytes / 4
        assert training.is_live(tools.live(puller.full_update()))
        assert len(source.requests) == 4  # one round trip each

    async def test_what_somebody_keeps_of_a_version_stays_when_the_next_one_comes(
        self, training, serve, puller, tools
    ):
        await serve()
        first = await pull(puller, training, training.publish())
        kept = {part.spec.name: part.values for part in first.update.tensors}
        before = {name: values.copy() for name, values in kept.items()}

        await pull(puller, training, training.publish())

        assert all((kept[name] == before[name]).all() for name in kept)
        assert training.is_live(tools.live(puller.full_update()))

    async def test_what_is_pulled_whole_cannot_be_written_to(self, training, serve, puller):
        await serve()
        update = (await pull(puller, training, training.publish())).update

        assert not any(part.values.flags.writeable for part in update.tensors)

    async def test_a_reader_that_is_behind_catches_up_by_a_chain(
        self, training, serve, puller, tools
    ):
        await serve()
        first = await pull(puller, training, training.publish())
        for _ in range(5):
            info = training.publish()
        pulled = await pull(puller, training, info)
        assert pulled.update.base_version == 0
        chain = [training.infos[version].patches[0] for version in range(1, 6)]
        assert pulled.nbytes == sum(patch.payload_nbytes for patch in chain)
        assert training.is_live(tools.live(pulled.update, tools.live(first.update)))

    async def test_the_whole_is_pulled_where_the_chain_has_more_bytes(
        self, training, serve, puller, tools
    ):
        await serve()
        await pull(puller, training, training.publish())
        for _ in range(6):
            info = training.publish(share=0.2, is_noise=True)
        pulled = await pull(puller, training, info)
        assert pulled.update.base_version is None
        assert pulled.nbytes <= 2 * training.layout.nbytes
        assert training.is_live(tools.live(pulled.update))

    async def test_a_version_that_is_held_comes_whole_and_costs_nothing(
        self, training, serve, puller, tools
    ):
        source = await serve()
        info = training.publish()
        await pull(puller, training, info)
        again = await pull(puller, training, info)
        assert (again.nbytes, again.reports, again.update.base_version) == (0, (), None)
        assert training.is_live(tools.live(again.update))
        assert len(source.requests) == 1

    async def test_an_older_version_is_pulled_whole(self, training, serve, puller, tools):
        await serve()
        infos = [training.publish() for _ in range(3)]
        await pull(puller, training, infos[2])
        pulled = await pull(puller, training, infos[1])
        assert (puller.version, pulled.update.base_version) == (1, None)
        pulled = await pull(puller, training, infos[2])
        assert training.is_live(tools.live(puller.full_update()))

    async def test_a_version_without_any_change_costs_no_payload(self, training, serve, puller):
        await serve()
        await pull(puller, training, training.publish())
        pulled = await pull(puller, training, training.publish(share=0))
        assert (pulled.nbytes, pulled.update.tensors, puller.version) == (0, (), 1)

    async def test_an_update_does_not_change_when_the_held_state_moves_on(
        self, training, serve, puller, tools
    ):
        await serve()
        pulled = await pull(puller, training, training.publish())
        kept, then = tools.live(pulled.update), training.tensors.copy()
        await pull(puller, training, training.publish(share=1))
        assert all((kept[name] == then[name]).all() for name in then)

    @pytest.mark.parametrize("share", [0.001, 0.3, 1])
    async def test_what_is_given_whole_while_a_version_is_about_to_be_written_is_all_of_one(
        self, share, training, serve, tools
    ):
        class Relay(WeightRelay):
            """As a server that was lost, and wants its weights in just that moment."""

            def release(self, *, is_written=True):
                super().release(is_written=is_written)
                if puller.version is not None:
                    given.append(puller.full_update())

        given = []
        puller = WeightPuller(training.policy_id, relay=Relay())
        try:
            await serve()
            await pull(puller, training, training.publish())
            then = training.tensors.copy()
            await pull(puller, training, training.publish(share=share))
            await puller.flush()
            assert training.is_live(tools.live(puller.full_update()))
        finally:
            await puller.close()
        (update,) = given
        kept = tools.live(update)
        assert update.version == 0
        assert all((kept[name] == then[name]).all() for name in then)

    async def test_another_architecture_starts_from_nothing(self, training, serve, puller, tools):
        await serve()
        await pull(puller, training, training.publish())
        other = tools.training(BIG)
        await serve(other.store)
        other.endpoints = training.endpoints[1:]
        pulled = await pull(puller, other, other.publish())
        assert other.is_live(tools.live(pulled.update))


class TestFaults:
    async def test_a_lying_source_costs_a_retry_from_the_next_and_is_reported(
        self, training, serve, puller, tools
    ):
        liar, honest = await serve(), await serve()
        liar.spoil_chunk = tools.flipped
        pulled = await pull(puller, training, training.publish())
        assert training.is_live(tools.live(pulled.update))
        assert [report.bad_chunk_count for report in pulled.reports] == [1, 0]
        assert [report.address for report in pulled.reports] == [liar.address, honest.address]
        assert pulled.reports[0].failure.reason is Reason.DIGEST_MISMATCH
        assert pulled.reports[1].failure is None

    async def test_what_a_liar_sent_well_need_not_be_sent_again(self, serve, puller, tools):
        training = tools.training(BIG)
        liar, honest = await serve(training.store), await serve(training.store)
        training.endpoints = [liar.address, honest.address]
        liar.spoil_chunk = lambda message: (
            tools.flipped(message) if message.header.index == 2 else message
        )
        pulled = await pull(puller, training, training.publish())
        assert training.is_live(tools.live(pulled.update))
        assert [each.start for each in honest.requests[0].have_chunks[0].indexes] == [0]
        assert honest.chunk_count == 2
        assert pulled.nbytes == training.infos[0].patches[0].payload_nbytes

    async def test_a_cut_pull_resumes_from_the_same_source(self, serve, puller, tools):
        training = tools.training(BIG)
        source = await serve(training.store)
        training.endpoints = [source.address]
        source.cuts = [1, 2]
        pulled = await pull(puller, training, training.publish())
        assert training.is_live(tools.live(pulled.update))
        assert source.chunk_count == 4
        assert [len(request.have_chunks) for request in source.requests] == [0, 1, 1]
        assert len(pulled.reports) == 1

    async def test_a_failed_pull_is_gone_on_with_by_the_next(self, serve, puller, tools):
        training = tools.training(BIG)
        source = await serve(training.store)
        training.endpoints = [source.address]
        source.cuts = [1] + [0] * 9
        error = await refused(puller, training, training.publish(), Reason.SOURCE_UNREACHABLE)
        assert error.retryable
        assert error.reports[0].nbytes == CHUNK_NBYTES
        source.cuts = []
        pulled = await pull(puller, training, training.infos[0])
        assert pulled.nbytes == training.infos[0].patches[0].payload_nbytes - CHUNK_NBYTES
        assert training.is_live(tools.live(pulled.update))

    async def test_a_failed_pull_of_a_packed_version_is_gone_on_with_by_the_next(
        self, serve, puller, tools
    ):
        """What was decoded already is let go, but for its bits."""
        training = tools.training(BIG)
        source = await serve(training.store)
        training.endpoints = [source.address]
        training.publish()
        packed = make_patch(training.publisher.history, None, 0, profile=CodecProfile.COMPACT)
        info = replace(training.add(packed), patches=(packed.info,))
        training.infos[0] = info
        source.cuts = [1] + [0] * 9
        error = await refused(puller, training, info, Reason.SOURCE_UNREACHABLE)
        source.cuts = []
        pulled = await pull(puller, training, info)

        assert pulled.nbytes == packed.info.payload_nbytes - error.reports[0].nbytes
        assert training.is_live(tools.live(pulled.update))

    async def test_a_source_that_ends_early_is_not_believed(self, training, serve, puller):
        source = await serve()
        source.ends_early = True
        error = await refused(puller, training, training.publish(), Reason.SOURCE_UNREACHABLE)
        assert "chunks before the end" in error.message

    async def test_an_origin_that_has_stopped_is_left_for_another(self, training, serve, tools):
        stopped, other = await serve(), await serve()
        stopped.stalls = True
        timeouts = StallTimeouts(silent_s=0.1, first_s=0.1)
        settings = FetchSettings(origin_timeouts=timeouts, shared_nbytes=1 << 40)
        puller = WeightPuller(training.policy_id, settings=settings)

        pulled = await puller.pull(training.publish(), training.infos, training.token)

        assert training.is_live(tools.live(pulled.update))
        assert [each.failure and each.failure.reason for each in pulled.reports] == [
            Reason.SOURCE_TIMEOUT,
            None,
        ]
        assert other.chunk_count > 0
        await puller.close()

    async def test_the_only_source_is_waited_for_and_that_is_said(self, training, serve, capsys):
        (await serve()).stalls = True
        settings = FetchSettings(origin_timeouts=StallTimeouts(silent_s=0.1, first_s=0.1))
        puller = WeightPuller(training.policy_id, stall_timeout_s=2.0, settings=settings)

        with pytest.raises(PullFailed) as caught:
            await puller.pull(training.publish(), training.infos, training.token)

        assert caught.value.reason is Reason.SOURCE_TIMEOUT
        assert "waited for, as there is no other" in capsys.readouterr().out
        await puller.close()

    async def test_a_source_that_stalls_is_given_up(self, training, serve, tools):
        silent, lively = await serve(), await serve()
        silent.stalls = True
        puller = WeightPuller(training.policy_id, stall_timeout_s=2.0)
        pulled = await pull(puller, training, training.publish())
        assert [each.failure and each.failure.reason for each in pulled.reports] == [
            Reason.SOURCE_TIMEOUT,
            None,
        ]
        assert training.is_live(tools.live(pulled.update))
        assert lively.chunk_count
        await puller.close()

    async def test_a_source_that_is_gone_is_reported_and_the_next_one_taken(
        self, training, serve, puller
    ):
        gone = await serve()
        await gone.stop()
        await serve()
        pulled = await pull(puller, training, training.publish())
        assert [each.failure and each.failure.reason for each in pulled.reports] == [
            Reason.SOURCE_UNREACHABLE,
            None,
        ]

    async def test_a_version_without_source_is_an_error(self, training, puller):
        await refused(puller, training, training.publish(), Reason.SOURCE_UNREACHABLE)

    async def test_what_is_held_survives_a_version_that_nobody_gives_truly(
        self, training, serve, puller, tools
    ):
        source = await serve()
        await pull(puller, training, training.publish())
        held = tools.live(puller.full_update())
        source.spoil_chunk = tools.flipped
        error = await refused(puller, training, training.publish(), Reason.DIGEST_MISMATCH)
        assert error.reports[0].bad_chunk_count == 1
        assert puller.version == 0
        still = tools.live(puller.full_update())
        assert all((still[name] == held[name]).all() for name in held)

    async def test_a_state_that_is_not_the_registered_one_is_refused(
        self, training, serve, puller, tools
    ):
        await serve()
        await pull(puller, training, training.publish())
        held = tools.live(puller.full_update())
        info = replace(training.publish(), content_digest=bytes(16))
        error = await refused(puller, training, info, Reason.DIGEST_MISMATCH)
        assert "not version 1" in error.message
        still = tools.live(puller.full_update())
        assert all((still[name] == held[name]).all() for name in held)

    async def test_a_base_that_rotted_is_found_and_replaced_by_a_whole_pull(
        self, training, serve, puller, tools
    ):
        await serve()
        await pull(puller, training, training.publish())
        await puller.flush()
        # One wrong element that the next version changes: its old bits no longer add up.
        puller._holding.state.flat[: training.layout.tensors[0].nbytes] ^= 1
        pulled = await pull(puller, training, training.publish(share=0.2))
        assert pulled.update.base_version is None
        assert training.is_live(tools.live(pulled.update))

    @pytest.mark.parametrize("unreachable", [[], ["127.0.0.1:1"]])
    async def test_a_base_that_is_forgotten_costs_a_whole_pull(
        self, serve, puller, tools, unreachable
    ):
        training = tools.training(keep_patches=2)
        source = await serve(training.store)
        training.endpoints = [source.address, *unreachable]
        await pull(puller, training, training.publish())
        for _ in range(4):
            info = training.publish()
        pulled = await pull(puller, training, info)
        assert [request.base_version for request in source.requests] == [None, 0, None]
        assert pulled.update.base_version is None
        assert training.is_live(tools.live(pulled.update))

    async def test_a_version_that_nobody_keeps_is_evicted(self, serve, puller, tools):
        training = tools.training(keep_patches=2)
        training.endpoints = [(await serve(training.store)).address]
        infos = [training.publish() for _ in range(6)]
        error = await refused(puller, training, infos[0], Reason.VERSION_EVICTED)
        assert error.reports[0].failure.reason is Reason.VERSION_EVICTED
        assert puller.version is None
        await refused(puller, training, replace(infos[5], version=9), Reason.VERSION_UNKNOWN)

    async def test_the_wrong_token_opens_nothing(self, training, serve, puller):
        await serve()
        info = training.publish()
        with pytest.raises(AstraflowError) as caught:
            await puller.pull(info, training.infos, b"wrong")
        assert caught.value.reason is Reason.TOKEN_INVALID

    async def test_a_cancelled_pull_leaves_all_as_it_was(self, training, serve, puller, tools):
        source = await serve()
        await pull(puller, training, training.publish())
        source.stalls = True
        source.asked.clear()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(pull(puller, training, training.publish()))
            await source.asked.wait()
            task.cancel()
        assert puller.version == 0
        source.stalls = False
        await pull(puller, training, training.infos[1])
        assert training.is_live(tools.live(puller.full_update()))

    async def test_a_lane_that_is_closed_under_a_pull_is_a_failure_of_the_pull(
        self, training, serve
    ):
        source, lane = await serve(), GrpcLane()
        source.stalls = True
        puller = WeightPuller(training.policy_id, lane=lane)
        pulling = asyncio.create_task(pull(puller, training, training.publish()))
        await source.asked.wait()
        await lane.close()
        with pytest.raises(PullFailed) as caught:
            await pulling
        assert caught.value.reason is Reason.SOURCE_UNREACHABLE
        await puller.close()


class TestLies:
    """A source whose every message can be anything: what is held is true or stays."""

    async def test_a_patch_that_the_run_did_not_register_is_refused(
        self, training, serve, puller, tools
    ):
        stranger = tools.training(seed=7)
        await serve(stranger.store)
        stranger.publish()
        error = await refused(puller, training, training.publish(), Reason.PATCH_UNKNOWN)
        assert puller.version is None
        assert "none that the run told of" in error.message

    async def test_digests_that_do_not_add_up_to_the_root_are_a_lie(self, training, serve, puller):
        def lie(plan):
            plan.patches[0].chunk_digests[0] = bytes(32)
            return plan

        liar = await serve()
        liar.spoil_plan = lie
        await serve()
        pulled = await pull(puller, training, training.publish())
        assert [report.bad_chunk_count for report in pulled.reports] == [1, 0]

    @pytest.mark.parametrize(
        "lie",
        [
            lambda chunk: chunk.header.__setattr__("index", 7),
            lambda chunk: chunk.header.__setattr__("index", -1),
            lambda chunk: chunk.header.__setattr__("offset", 64),
            lambda chunk: chunk.header.__setattr__("nbytes", 1 << 40),
            lambda chunk: chunk.header.__setattr__("dtype", 0),
            lambda chunk: chunk.header.__setattr__("encoding", 99),
            lambda chunk: chunk.header.__setattr__("compression", 2),
            lambda chunk: chunk.header.__setattr__("changed_count", 3),
            lambda chunk: chunk.__setattr__("patch_index", 1),
            lambda chunk: chunk.__setattr__("patch_index", -1),
            lambda chunk: chunk.__setattr__("payload", chunk.payload[:-1]),
            lambda chunk: chunk.__setattr__("payload", chunk.payload + b"0"),
            lambda chunk: chunk.__setattr__("payload", b""),
        ],
    )
    async def test_no_changed_field_of_a_chunk_passes(self, training, serve, puller, lie):
        def spoil(chunk):
            lie(chunk)
            return chunk

        source = await serve()
        source.spoil_chunk = spoil
        error = await caught(puller, training, training.publish())
        assert error.reason in (Reason.DIGEST_MISMATCH, Reason.CHUNK_INVALID)
        assert puller.version is None

    async def test_a_plan_for_another_version_or_base_is_refused(self, training, serve, puller):
        source = await serve()
        await pull(puller, training, training.publish())
        for _ in range(2):
            info = training.publish()
        forward = training.plan(2, 0)

        def other(patches):
            def spoil(plan):
                del plan.patches[:]
                plan.patches.extend(encode_patch_index(patch.index) for patch in patches)
                return plan

            return spoil

        for patches in (forward[1:], forward[:1], forward[::-1], ()):
            source.spoil_plan = other(patches)
            await refused(puller, training, info, Reason.CHUNK_INVALID)
            assert puller.version == 0

    async def test_another_layout_than_the_registered_one_is_refused(self, training, serve, puller):
        source = await serve()

        def rename(layout):
            layout.tensors[0].name = "another"

        source.spoil_layout = rename
        await refused(puller, training, training.publish(), Reason.DIGEST_MISMATCH)

    async def test_a_layout_that_says_what_it_adapts_is_named_and_its_source_no_liar(
        self, training, serve, puller
    ):
        source = await serve()

        def adapt(layout):
            layout.adapter.base_name = "base"

        source.spoil_layout = adapt
        error = await refused(puller, training, training.publish(), Reason.INVALID_FIELD)
        assert "adapter" in error.message
        assert [report.bad_chunk_count for report in error.reports] == [0]

    async def test_a_layout_is_proven_before_memory_is_given_to_its_ranges(
        self, training, serve, puller
    ):
        source = await serve()

        def enlarge(layout):
            nbytes = 1 << 42
            layout.tensors.add(
                name="z",
                dtype=layout.tensors[0].dtype,
                shape=[nbytes // 2],
                offset=layout.nbytes,
                nbytes=nbytes,
            )
            layout.nbytes += nbytes

        source.spoil_layout = enlarge
        info = training.publish()
        tracemalloc.start()
        try:
            await refused(puller, training, info, Reason.DIGEST_MISMATCH)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 64 << 20


def test_a_patch_of_another_byte_format_is_not_even_asked_for(training):
    async def go():
        puller = WeightPuller(training.policy_id)
        info = training.publish()
        newer = tuple(replace(patch, codec_version=99) for patch in info.patches)
        await refused(puller, training, replace(info, patches=newer), Reason.PATCH_UNKNOWN)

    asyncio.run(go())


async def test_a_pull_says_where_its_time_went_and_tells_who_listens(training, serve, tools):
    class Bar:
        def begin(self, incoming, frame):
            self.incoming, self.left = incoming, []

        def note(self):
            self.left.append((self.incoming.nbytes, self.incoming.left_nbytes))

    bar = Bar()
    await serve()
    info = training.publish()
    puller = WeightPuller(training.policy_id, progress=bar)
    pulled = await puller.pull(info, training.infos, training.token)
    await puller.close()
    assert bar.left[-1] == (pulled.nbytes, 0)
    assert bar.left[0][1] == pulled.nbytes
    times = pulled.times
    assert min(times.verify, times.decode, times.stage).total_seconds() > 0


class TestGainedPatches:
    async def test_a_patch_that_came_after_the_version_was_told_is_asked_about(
        self, training, serve, puller, tools
    ):
        """What is known is as old as the last event: the source may have a better way since."""
        await serve()
        info, listed = training.publish(), []
        whole = make_patch(training.publisher.history, None, 0, profile=CodecProfile.COMPACT)
        newer = training.add(whole)

        async def ask():
            listed.append(newer)
            return [newer]

        pulled = await puller.pull(info, {0: info}, training.token, listed=ask)

        assert training.is_live(tools.live(pulled.update))
        assert pulled.nbytes == whole.info.payload_nbytes
        assert listed == [newer]

    async def test_what_the_run_does_not_know_either_is_refused(self, training, serve, puller):
        await serve()
        info = training.publish()
        training.add(make_patch(training.publisher.history, None, 0, profile=CodecProfile.COMPACT))

        async def ask():
            return [info]

        with pytest.raises(PullFailed) as caught:
            await puller.pull(info, {0: info}, training.token, listed=ask)
        assert caught.value.reason is Reason.PATCH_UNKNOWN


class TestCommit:
    async def test_what_is_held_is_whole_when_it_is_asked_for_at_once(self, serve, puller, tools):
        """It may still be written while the engine has its part already."""
        training = tools.training(WIDE)
        training.endpoints = [(await serve(training.store)).address]
        await pull(puller, training, training.publish())
        for _ in range(3):
            await pull(puller, training, training.publish())
            assert training.is_live(tools.live(puller.full_update()))

    async def test_who_is_cancelled_while_it_is_written_breaks_nothing_off(
        self, serve, puller, tools
    ):
        training = tools.training(WIDE)
        training.endpoints = [(await serve(training.store)).address]
        await pull(puller, training, training.publish())
        info = training.publish()
        await pull(puller, training, info)
        waiting = [asyncio.ensure_future(puller.flush()) for _ in range(3)]
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

        pulled = await pull(puller, training, training.publish())

        assert pulled.update.base_version == info.version
        assert training.is_live(tools.live(puller.full_update()))


@pytest.mark.parametrize("step", [0, 1], ids=["none", "the-same"])
async def test_steps_of_one_root_are_gone_over_in_one_pull(training, serve, puller, tools, step):
    await serve()
    await pull(puller, training, training.publish())
    for _ in range(3):
        training.tensors = {name: bits + step for name, bits in training.tensors.items()}
        info = training.publish(share=0)
    pulled = await pull(puller, training, info)
    assert pulled.update.version == puller.version == info.version
    assert training.is_live(tools.live(puller.full_update()))
