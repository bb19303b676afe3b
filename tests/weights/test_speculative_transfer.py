"""The next version is sent while it is made; what counts is still what the run registered."""

import asyncio
from dataclasses import replace

import pytest

from astraflow.codec.chunks import Chunk
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import CodecProfile, LaneKind
from astraflow.transport.assembly import UNPLANNED_NBYTES
from astraflow.weights.fetch import puller as puller_module
from astraflow.weights.fetch.lanes import AnyLane
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.patches.patch import PatchName, index_of
from astraflow.weights.serve.server import TransferServer, WeightServer
from astraflow.wire.transfers import TransferPlan, TransferSpec
from astraflow.wire.weights import SentChunk

# A chunk of each tensor: neighbours differ in type.
LAYOUT = Layout.of([(f"t{n}", (Dtype.BF16, Dtype.F32)[n % 2], (4000,)) for n in range(6)])


@pytest.fixture
def training(tools):
    training = tools.training(LAYOUT)
    training.publish()
    return training


@pytest.fixture
def made(tools):
    """Make the patch to version 1, as a training with this share and seed does."""

    def make(**how):
        twin = tools.training(LAYOUT)
        twin.publish()
        twin.publish(**how)
        return next(each for each in twin.store.patches if each.info.version == 1)

    return make


@pytest.fixture
def stand_ready(training):
    """Stand ready for version 1, beside any lane."""
    servicer = TransferServer({training.policy_id: training.store})
    spec = TransferSpec(policy_id=training.policy_id, version=1, base_version=0, is_ahead=True)
    return lambda **fields: servicer.open_transfer(replace(spec, **fields)).items()


@pytest.fixture
def serve(training, tools):
    """Start servers of the training's versions, with a TCP lane."""
    servers = []

    def start():
        server = WeightServer(training.publisher, lanes=[LaneKind.TCP])
        servers.append(server)
        server.__enter__()
        server.set_transfer_token(training.token)
        training.endpoints.append(server.endpoint)
        return server

    yield start
    for server in servers:
        server.__exit__(None, None, None)


@pytest.fixture
async def puller(training):
    puller = WeightPuller(training.policy_id, lane=AnyLane(lanes=[LaneKind.TCP]))
    yield puller
    await puller.close()


async def until_readers(count, patch):
    async with asyncio.timeout(60):
        while len(patch._readers) != count:  # noqa: ASYNC110 - it tells no one
            await asyncio.sleep(0)


async def at_zero(training, puller, tools):
    """Pull version 0, and return once the origin knows that the next one is waited for."""
    info = replace(training.infos[0], sources=tools.sources(training.endpoints))
    pulled = await puller.pull(info, training.infos, training.token)
    await until_readers(1, training.store.next[1])
    return tools.live(pulled.update)


async def pulled_live(training, puller, tools, tensors):
    newest = max(training.infos)
    pulled = await puller.pull(training.infos[newest], training.infos, training.token)
    assert training.is_live(tools.live(pulled.update, tensors))
    return pulled


async def everything(items):
    return [item async for item in items]


async def test_chunks_go_out_before_all_are_made_and_the_plan_when_it_is_known(
    training, stand_ready, made
):
    patch = made()
    items = stand_ready()
    first = asyncio.ensure_future(anext(items))
    with training.store.making(1) as growing:
        growing.add(patch.chunks[0])
        assert (await first).chunk is patch.chunks[0]
        for chunk in [*patch.chunks.values()][1:]:
            growing.add(chunk)
        growing.finish(patch.index)

        plan, *rest = await everything(items)

    assert isinstance(plan, TransferPlan)
    assert (plan.chunk_count, plan.payload_nbytes) == (6, patch.info.payload_nbytes)
    assert [sent.chunk for sent in rest] == [*patch.chunks.values()][1:]


async def test_a_slow_reader_holds_up_nobody_and_gets_the_rest_from_the_store(
    training, stand_ready, made
):
    items = stand_ready()
    training.publish()
    start = [await anext(items) for _ in range(3)]
    training.publish()
    training.publish()

    assert isinstance(start[0], TransferPlan)
    chunks = [sent.chunk for sent in (*start[1:], *await everything(items))]
    assert [bytes(each.payload) for each in chunks] == [
        bytes(c.payload) for c in made().chunks.values()
    ]


async def test_a_reader_that_is_too_slow_is_told(tools, stand_ready, training):
    items = stand_ready()
    training.publish()
    await anext(items)
    for _ in range(20):
        training.publish()

    with pytest.raises(AstraflowError) as caught:
        await everything(items)

    assert caught.value.reason is Reason.VERSION_EVICTED


async def test_what_a_reader_holds_before_the_plan_is_bounded(training, stand_ready, made):
    patch = made()
    half = memoryview(bytes(UNPLANNED_NBYTES // 2))
    items = stand_ready()
    with training.store.making(1) as growing:
        for chunk in [*patch.chunks.values()][:3]:
            growing.add(Chunk(header=chunk.header, payload=half))
        sent = [await anext(items), await anext(items)]
        third = asyncio.ensure_future(anext(items))
        growing.finish(patch.index)

        assert [isinstance(each, SentChunk) for each in (*sent, await third)] == [True, True, False]
    await items.aclose()


def test_who_is_better_off_with_the_smaller_patch_waits_for_it(training, made):
    """It is made after the other, of which nothing is sent."""
    store = training.store
    with store.making(1) as growing:
        header = replace(made().chunks[0].header, payload_nbytes=1 << 20)
        growing.add(Chunk(header=header, payload=bytes(1 << 20)))
        name = PatchName(version=1, base_version=0)
        growing.finish(index_of(name, [bytes(32)], payload_nbytes=1 << 20, sign=lambda each: each))

    asked = TransferSpec(policy_id=training.policy_id, version=2, base_version=1)
    readers = (
        asked,
        replace(asked, goodput_bytes_per_s=1e9),
        replace(asked, goodput_bytes_per_s=1e4),
        replace(asked, profiles=(CodecProfile.COMPACT,)),
    )
    assert [store.is_sooner(each) for each in readers] == [True, True, False, False]


async def test_who_waits_gets_what_was_published(training, stand_ready):
    items = stand_ready(profiles=(CodecProfile.COMPACT, CodecProfile.FAST))
    plan = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0)
    training.publish()

    assert (await plan).patches[0].patch == training.infos[1].patches[0]
    assert len(await everything(items)) == 6


async def test_nothing_but_the_next_version_is_sent_ahead(training, stand_ready):
    with pytest.raises(AstraflowError) as caught:
        stand_ready(version=2)
    assert caught.value.reason is Reason.INVALID_FIELD
    with pytest.raises(AstraflowError) as caught:
        stand_ready(version=9, base_version=8)
    assert caught.value.reason is Reason.VERSION_UNKNOWN


async def test_a_version_that_comes_whole_ends_what_was_sent_of_its_patch(training, stand_ready):
    items = stand_ready()
    first = asyncio.ensure_future(anext(items))
    await asyncio.sleep(0)
    training.publish(share=1, is_noise=True)

    assert isinstance(await first, SentChunk)
    with pytest.raises(AstraflowError) as caught:
        await everything(items)
    assert caught.value.reason is Reason.VERSION_EVICTED


async def test_the_next_version_was_asked_for_before_it_was_announced(
    training, tools, serve, puller
):
    """Those who ask later are not let in: the secret has changed twice."""
    server = serve()
    tensors = await at_zero(training, puller, tools)
    for secret in (b"second", b"third"):
        server.set_transfer_token(secret)
    training.publish()

    pulled = await pulled_live(training, puller, tools, tensors)

    assert pulled.nbytes == training.infos[1].patches[0].payload_nbytes
    assert [each.failure for each in pulled.reports] == [None]


async def test_versions_that_are_too_large_to_be_taken_ahead_are_not_asked_for(
    training, tools, serve, puller, monkeypatch
):
    monkeypatch.setattr(puller_module, "UNPLANNED_NBYTES", 64)
    serve()
    tensors = await at_zero(training, puller, tools)
    (source,) = puller._lane._sources.values()
    assert source.ready is not None
    training.publish()
    await pulled_live(training, puller, tools, tensors)
    assert source.ready is None


async def test_versions_follow_each_other_ahead(training, tools, serve, puller):
    serve()
    tensors = await at_zero(training, puller, tools)
    for _ in range(3):
        training.publish()
        newest = training.infos[max(training.infos)]
        pulled = await puller.pull(newest, training.infos, training.token)
        tensors = tools.live(pulled.update, tensors)

    assert training.is_live(tensors)


async def test_who_wants_a_later_version_gets_that(training, tools, serve, puller):
    serve()
    tensors = await at_zero(training, puller, tools)
    training.publish()
    training.publish()

    await pulled_live(training, puller, tools, tensors)


@pytest.mark.parametrize("count", [3, 6])
async def test_a_version_that_was_withdrawn_is_not_taken_for_the_one_that_was_announced(
    training, tools, serve, puller, made, count
):
    """It failed after so many chunks were sent; no source is blamed, and no copy is whole."""
    serve()
    tensors = await at_zero(training, puller, tools)
    other = made(share=0.5)
    with training.store.making(1) as growing:
        for chunk in [*other.chunks.values()][:count]:
            growing.add(chunk)
        if count == len(other.chunks):
            growing.finish(other.index)
            await until_readers(0, growing)
    training.publish()

    pulled = await pulled_live(training, puller, tools, tensors)

    assert [each.bad_chunk_count for each in pulled.reports] == [0]
    assert pulled.update.base_version == 0


async def test_a_source_that_dies_midway_is_left_for_another(training, tools, serve, puller, made):
    server, _ = serve(), serve()
    tensors = await at_zero(training, puller, tools)
    with training.store.making(1) as growing:
        growing.add(made().chunks[0])
        server.__exit__(None, None, None)
    training.publish()

    await pulled_live(training, puller, tools, tensors)


async def test_a_source_that_lies_ahead_is_found_out_and_left(training, tools, serve, puller, made):
    serve(), serve()
    tensors = await at_zero(training, puller, tools)
    patch = made()
    spoilt = bytearray(patch.chunks[2].payload)
    spoilt[7] ^= 1
    chunks = [*patch.chunks.values()]
    chunks[2] = Chunk(header=chunks[2].header, payload=spoilt)
    with training.store.making(1) as growing:
        for chunk in chunks:
            growing.add(chunk)
        growing.finish(patch.index)
        await until_readers(0, growing)
    training.publish()

    pulled = await pulled_live(training, puller, tools, tensors)

    assert [each.bad_chunk_count for each in pulled.reports] == [1, 0]
    assert pulled.update.base_version == 0


async def test_what_came_another_way_is_let_go(training, tools, serve, puller):
    """A relay had it: the origin is not left with a reader who never takes what it is sent."""
    other = serve()
    serve()
    training.endpoints.reverse()
    tensors = await at_zero(training, puller, tools)
    training.publish()
    only = replace(training.infos[1], sources=tools.sources([other.endpoint]))
    pulled = await puller.pull(only, training.infos, training.token)
    tensors = tools.live(pulled.update, tensors)

    await until_readers(1, training.store.next[1])
    training.publish()
    await pulled_live(training, puller, tools, tensors)


async def test_over_other_lanes_nothing_is_sent_ahead(training, tools, serve):
    serve()
    spec = TransferSpec(policy_id=training.policy_id, version=1, base_version=0, is_ahead=True)
    lane = AnyLane(lanes=[LaneKind.GRPC])
    await lane.stand_ready(training.endpoints[0], spec, training.token)
    with pytest.raises(AstraflowError) as caught:
        await everything(lane.pull(training.endpoints[0], spec, training.token))
    await lane.close()

    assert caught.value.reason is Reason.LANE_UNAVAILABLE
