"""A relay serves what its puller pulls, while it arrives, and nothing that was not verified."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import SourceInfo, SourceKind, SourceState
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.fetch.sources import FetchSettings
from astraflow.weights.heartbeat import StallTimeouts
from astraflow.weights.patches.patch import make_patch
from astraflow.weights.serve import relay as relay_module
from astraflow.weights.serve.relay import WeightRelay
from astraflow.wire.transfers import TransferSpec

LARGE = Layout.of([("w", Dtype.BF16, (9 << 20,)), ("x", Dtype.F32, (3, 5))])

PATIENT = StallTimeouts(silent_s=10.0, first_s=10.0, idle_s=10.0)


def via(info, *endpoints, state=SourceState.PULLING):
    """Return a version with relays in front of its other sources."""
    relays = [SourceInfo(kind=SourceKind.RELAY, state=state, endpoint=each) for each in endpoints]
    return replace(info, sources=(*relays, *info.sources))


@pytest.fixture
async def make_puller(training):
    pullers = []

    def make(*, relay=None, **settings):
        puller = WeightPuller(
            training.policy_id,
            relay=relay,
            settings=FetchSettings(**settings) if settings else None,
        )
        pullers.append(puller)
        return puller

    yield make
    for puller in pullers:
        await puller.close()


@pytest.fixture
async def relayed(training, serve, make_puller):
    """An origin, and a relay beside a puller."""
    origin = await serve()
    relay = WeightRelay(wait_s=2)
    source = await serve(relay)
    training.endpoints.remove(source.address)
    first, second = make_puller(relay=relay), make_puller(relay_timeouts=PATIENT)

    class Scene:
        pass

    scene = Scene()
    scene.origin, scene.relay, scene.source = origin, relay, source
    scene.first, scene.second = first, second
    scene.pull = lambda puller, info: puller.pull(info, training.infos, training.token)
    scene.way = lambda version, base_version: relay.plan(
        TransferSpec(policy_id=training.policy_id, version=version, base_version=base_version)
    )
    return scene


async def test_a_version_is_passed_on_and_the_origin_is_asked_once(training, relayed, tools):
    info = training.publish()
    updates = await asyncio.gather(
        relayed.pull(relayed.first, info),
        relayed.pull(relayed.second, via(info, relayed.source.address)),
    )
    assert all(training.is_live(tools.live(each.update)) for each in updates)
    assert len(relayed.origin.requests) == 1
    info = training.publish()
    updates = await asyncio.gather(
        relayed.pull(relayed.second, via(info, relayed.source.address)),
        relayed.pull(relayed.first, info),
    )
    assert len(relayed.origin.requests) == 2
    assert updates[0].reports[0].nbytes == updates[0].nbytes > 0


async def test_chunks_are_passed_on_before_the_last_one_is_here(training, relayed):
    info = training.publish()
    gate, seen = asyncio.Event(), asyncio.Event()
    inner = relayed.origin.servicer.Pull

    async def slow(request, context):
        sent = 0
        async for response in inner(request, context):
            if sent == 3:
                await gate.wait()
            sent += 1
            yield response

    def passed(message):
        seen.set()
        return message

    relayed.origin.servicer.Pull = slow
    relayed.source.spoil_chunk = passed
    async with asyncio.TaskGroup() as group:
        group.create_task(relayed.pull(relayed.first, info))
        group.create_task(relayed.pull(relayed.second, via(info, relayed.source.address)))
        await seen.wait()
        assert not gate.is_set()
        gate.set()


async def test_a_lying_relay_costs_a_retry_and_is_reported(training, relayed, tools):
    info = training.publish()
    await relayed.pull(relayed.first, info)
    relayed.source.spoil_chunk = tools.flipped
    pulled = await relayed.pull(relayed.second, via(info, relayed.source.address))
    assert training.is_live(tools.live(pulled.update))
    liar, honest = pulled.reports
    assert (liar.address, liar.bad_chunk_count) == (relayed.source.address, 1)
    assert honest.bad_chunk_count == 0


async def test_a_relay_that_dies_midway_is_followed_by_the_next_source(training, relayed, tools):
    info = training.publish()
    await relayed.pull(relayed.first, info)
    relayed.source.cuts = [2]
    pulled = await relayed.pull(relayed.second, via(info, relayed.source.address))
    assert training.is_live(tools.live(pulled.update))
    assert len(relayed.origin.requests[-1].have_chunks) == 1
    relay, origin = pulled.reports
    assert relay.nbytes > 0 < origin.nbytes


async def test_who_waits_is_told_when_the_relays_own_pull_fails(training, relayed, tools):
    info = training.publish()
    relayed.origin.stalls = True
    async with asyncio.TaskGroup() as group:
        cut = group.create_task(relayed.pull(relayed.first, info))
        waiting = group.create_task(relayed.pull(relayed.second, via(info, relayed.source.address)))
        await relayed.source.asked.wait()
        await relayed.origin.asked.wait()
        relayed.origin.stalls = False
        cut.cancel()
        pulled = await waiting
    assert training.is_live(tools.live(pulled.update))


async def test_a_version_that_never_begins_is_had_elsewhere(training, relayed, tools):
    training.publish()
    relayed.relay._wait_s = 0.05
    pulled = await relayed.pull(relayed.second, via(training.infos[0], relayed.source.address))
    assert training.is_live(tools.live(pulled.update))
    assert pulled.reports[0].failure.reason is Reason.SOURCE_UNREACHABLE


async def test_a_relay_that_is_stopped_is_left_reported_and_asked_last(
    training, relayed, make_puller, tools
):
    info = training.publish()
    await relayed.pull(relayed.first, info)
    relayed.source.stalls = True
    hasty = make_puller(relay_timeouts=StallTimeouts(silent_s=0.1, first_s=0.1))
    pulled = await relayed.pull(hasty, via(info, relayed.source.address))
    assert training.is_live(tools.live(pulled.update))
    stopped, origin = pulled.reports
    assert stopped.failure.reason is Reason.SOURCE_TIMEOUT
    assert origin.failure is None
    info = training.publish()
    pulled = await relayed.pull(hasty, via(info, relayed.source.address))
    assert [each.address for each in pulled.reports] == [relayed.origin.address]


async def test_a_relay_that_waits_itself_is_not_left(training, relayed, make_puller, tools):
    hasty = make_puller(relay_timeouts=StallTimeouts(silent_s=0.6, first_s=10.0, idle_s=60.0))
    info = training.publish()
    relayed.origin.stalls = True
    async with asyncio.TaskGroup() as group:
        cut = group.create_task(relayed.pull(relayed.first, info))
        waiting = group.create_task(relayed.pull(hasty, via(info, relayed.source.address)))
        while relayed.source.sign_count < 4:  # a second
            await relayed.source.signed.wait()
            relayed.source.signed.clear()
        assert not waiting.done()
        assert not any(each.link.silent_until_s for each in hasty._memory.ordered(info))
        relayed.origin.stalls = False
        cut.cancel()
        pulled = await waiting
    assert training.is_live(tools.live(pulled.update))


async def test_a_cold_receiver_gets_the_whole_from_what_a_relay_holds(training, relayed, tools):
    await relayed.pull(relayed.first, training.publish())
    training.publish()
    info = training.add(make_patch(training.publisher.history, None, 1))
    await relayed.pull(relayed.first, info)
    asked = len(relayed.origin.requests)
    target = via(info, relayed.source.address, state=SourceState.LIVE)
    pulled = await relayed.pull(relayed.second, target)
    assert training.is_live(tools.live(pulled.update))
    assert len(relayed.origin.requests) == asked


async def test_the_whole_goes_when_its_state_is_written_to(training, relayed):
    await relayed.pull(relayed.first, training.publish())
    spec = TransferSpec(policy_id=training.policy_id, version=0)
    await relayed.relay.expect(spec)
    (whole,) = relayed.way(0, None)
    assert (await relayed.relay.chunk(whole, 0)).payload
    await relayed.pull(relayed.first, training.publish())
    with pytest.raises(AstraflowError) as caught:
        await relayed.relay.chunk(whole, 0)
    assert caught.value.reason is Reason.VERSION_EVICTED


async def test_a_chain_of_passed_patches_is_served_and_bounded(training, relayed, monkeypatch):
    for _ in range(4):
        await relayed.pull(relayed.first, training.publish())
    assert [each.info.version for each in relayed.way(3, 0)] == [1, 2, 3]
    monkeypatch.setattr(relay_module, "_KEPT_NBYTES", 0)
    await relayed.pull(relayed.first, training.publish())
    assert [each.info.version for each in relayed.way(4, 3)] == [4]
    with pytest.raises(AstraflowError):
        relayed.way(4, 0)


async def test_a_whole_version_is_not_kept_twice_and_stays_whole_while_it_is_read(
    training, relayed
):
    relay, info = relayed.relay, training.publish()
    pulling = asyncio.create_task(relayed.pull(relayed.first, info))
    while not relay._patches:  # noqa: ASYNC110 - nothing to wait on
        await asyncio.sleep(0)
    (whole,) = relay._patches.values()
    with relay.reading([whole.info]):
        await pulling
        state = relayed.first._holding.state.flat
        assert all(np.shares_memory(each.payload, state) for each in whole.in_order())
        await relayed.pull(relayed.first, training.publish())
        await relayed.first.flush()
        assert whole.is_sound()
    assert whole.root not in relay._patches
    state = relayed.first._holding.state.flat
    await relayed.pull(relayed.first, training.publish())
    await relayed.first.flush()
    assert relayed.first._holding.state.flat is state


async def test_no_more_patches_are_kept_than_are_quickly_gone_through(training, relayed):
    for _ in range(70):
        await relayed.pull(relayed.first, training.publish())
    await relayed.first.flush()
    assert len(relayed.relay._patches) == 64


async def test_a_cold_join_draws_from_several_sources_and_ends_when_the_first_stalls(
    tools, make_puller, serve
):
    training = tools.training(LARGE)
    sources = [await serve(training.store) for _ in range(3)]
    training.endpoints = [each.address for each in sources]
    info = training.publish()
    inner = sources[0].servicer.Pull

    async def slow(request, context):
        async for response in inner(request, context):
            if response.WhichOneof("item") == "chunk" and response.chunk.header.index == 1:
                await asyncio.Event().wait()
            yield response

    sources[0].servicer.Pull = slow
    pulled = await make_puller(shared_nbytes=1).pull(info, training.infos, training.token)
    assert training.is_live(tools.live(pulled.update))
    gave = [report for report in pulled.reports if report.nbytes]
    assert len(gave) >= 2
    assert pulled.nbytes == sum(each.payload_nbytes for each in info.patches)


async def test_what_a_helper_gave_that_was_not_needed_to_its_end_counts(tools, make_puller, serve):
    training = tools.training(LARGE)
    sources = [await serve(training.store) for _ in range(2)]
    training.endpoints = [each.address for each in sources]
    info = training.publish()
    inner, given, gave = sources[1].servicer.Pull, [], asyncio.Event()

    async def stalling(request, context):
        async for response in inner(request, context):
            if response.WhichOneof("item") == "chunk":
                given.append(response)
            yield response
            if given:
                gave.set()
                await asyncio.Event().wait()

    async def waiting(request, context):
        async for response in first(request, context):
            if response.WhichOneof("item") == "chunk":
                await gave.wait()
            yield response

    first = sources[0].servicer.Pull
    sources[0].servicer.Pull, sources[1].servicer.Pull = waiting, stalling
    pulled = await make_puller(shared_nbytes=1).pull(info, training.infos, training.token)
    assert training.is_live(tools.live(pulled.update))
    assert pulled.nbytes == sum(each.payload_nbytes for each in info.patches)
    assert [report.address for report in pulled.reports] == training.endpoints


async def test_a_helper_that_lies_is_left_and_the_rest_comes_true(tools, make_puller, serve):
    training = tools.training(LARGE)
    sources = [await serve(training.store) for _ in range(2)]
    sources[1].spoil_chunk = tools.flipped
    training.endpoints = [each.address for each in sources]
    info = training.publish()
    pulled = await make_puller(shared_nbytes=1).pull(info, training.infos, training.token)
    assert training.is_live(tools.live(pulled.update))
    assert pulled.nbytes == info.patches[0].payload_nbytes
