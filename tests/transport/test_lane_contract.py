"""What every lane must do; a lane joins with one line in `LANES`."""

import asyncio
from dataclasses import replace

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.transport.groups import Carrier, ConnectionGroup
from astraflow.wire.transfers import ChunkSet, TransferBound

LANES = [
    (LaneKind.SHM, False),
    (LaneKind.TCP, False),
    (LaneKind.TCP, True),
    pytest.param((LaneKind.UCX, False), marks=pytest.mark.ucx),
    pytest.param((LaneKind.UCX, True), marks=pytest.mark.ucx),
]


def name_of(case):
    kind, is_encrypted = case
    return f"{kind}-encrypted" if is_encrypted else str(kind)


@pytest.fixture(params=LANES, ids=name_of)
def case(request):
    if request.param[0] is LaneKind.UCX:
        pytest.importorskip("ucxx", reason="needs astraflow[ucx]")
    return request.param


@pytest.fixture
def lane(case):
    return case[0]


@pytest.fixture
async def source(serve, case):
    return await serve(lanes=[case[0]], seals=case[1])


@pytest.fixture
def lanes(open_lanes, case):
    return open_lanes(case[0], encrypts=case[1])


def same(chunks, expected):
    return sorted(chunks) == [each.header.index for each in expected] and all(
        chunks[each.header.index].header == each.header
        and bytes(chunks[each.header.index].payload) == each.payload
        for each in expected
    )


async def test_all_chunks_arrive_bit_for_bit(tools, source, lanes):
    source.chunks = [tools.chunk_of(n, size) for n, size in enumerate([0, 1, 4 << 20, 70_001, 0])]

    chunks = await tools.pulled(lanes, source)

    assert same(chunks, source.chunks)
    assert source.calls == ["list", "request"]
    await tools.settled(lambda: source.transfers[0].is_closed)


async def test_connections_stay_for_the_next_version(tools, source, lanes):
    for _ in range(3):
        assert same(await tools.pulled(lanes, source), source.chunks)

    assert source.calls == ["list", *["request"] * 3]
    await tools.settled(lambda: all(each.is_closed for each in source.transfers))


async def test_nothing_to_send_is_a_plan_and_no_more(tools, source, lanes):
    everything = replace(tools.spec, have_chunks=(ChunkSet(root_digest=tools.root),))
    for _ in range(2):
        assert await tools.pulled(lanes, source, everything) == {}


async def test_a_wrong_secret_is_refused_cold_and_warm(tools, source, lanes):
    assert (await tools.failure(lanes, source, token=b"x")).reason is Reason.TOKEN_INVALID
    await tools.pulled(lanes, source)
    assert (await tools.failure(lanes, source, token=b"x")).reason is Reason.TOKEN_INVALID
    assert source.calls == ["list", "list", "request"]


async def test_a_refusal_keeps_its_reason_cold_and_warm(tools, source, lanes):
    unknown = replace(tools.spec, version=9)
    assert (await tools.failure(lanes, source, unknown)).reason is Reason.VERSION_UNKNOWN
    await tools.pulled(lanes, source)
    assert (await tools.failure(lanes, source, unknown)).reason is Reason.VERSION_UNKNOWN
    assert same(await tools.pulled(lanes, source), source.chunks)


async def test_a_broken_lane_goes_on_over_grpc_with_what_is_missing(tools, source, lanes):
    async def hold(number):
        if source.calls[-1] == "request" and number == 5:
            await asyncio.Event().wait()

    source.before, taken = hold, []
    pulling = lanes.pull(source.address, tools.spec, tools.token)
    await anext(pulling)
    async for sent in pulling:
        taken.append(sent.chunk)
        if len(taken) == 5:
            await source.hosts.close()

    assert same({each.header.index: each for each in taken}, source.chunks)
    assert source.calls == ["list", "request", "pull"]
    assert len(source.transfers[1].sent) == len(source.chunks) - 5


async def test_a_hundred_chunks_move_to_another_lane_midway(tools, source, lanes):
    source.chunks = [tools.chunk_of(index, 1 + 500 * (index % 7)) for index in range(100)]
    pulling, taken = lanes.pull(source.address, tools.spec, tools.token), {}
    await anext(pulling)

    async def hold(number):
        if source.calls[-1] == "request" and number == 50:
            await asyncio.Event().wait()

    source.before = hold
    async for sent in pulling:
        assert sent.chunk.header.index not in taken
        taken[sent.chunk.header.index] = sent.chunk
        if len(taken) == 40:
            await source.hosts.close()

    assert same(taken, source.chunks)
    assert source.calls == ["list", "request", "pull"]
    assert 50 <= len(source.transfers[1].sent) <= 60


async def test_a_source_that_falls_silent_is_left_for_grpc(tools, source, open_lanes, lane):
    async def stall(number):
        if source.calls[-1] == "request" and number == 2:
            await asyncio.Event().wait()

    source.before = stall
    lanes = open_lanes(lane, stall_timeout_s=1.5)

    assert same(await tools.pulled(lanes, source), source.chunks)
    assert source.calls == ["list", "request", "pull"]
    await tools.settled(lambda: source.transfers[0].is_closed)


async def test_more_bytes_than_the_plan_said_are_a_lie(tools, source, lanes):
    source.spoil_plan = lambda plan: replace(plan, payload_nbytes=1)

    assert (await tools.failure(lanes, source)).reason is Reason.CHUNK_INVALID
    await tools.settled(lambda: source.transfers[0].is_closed)


async def test_more_chunks_than_the_plan_said_never_reach_the_reader(tools, source, lanes):
    source.spoil_plan = lambda plan: replace(plan, chunk_count=2)

    assert len(await tools.pulled(lanes, source)) == 2


async def test_a_chunk_that_comes_twice_is_a_lie(tools, source, lanes):
    source.chunks[4] = source.chunks[3]

    assert (await tools.failure(lanes, source)).reason is Reason.CHUNK_INVALID


async def test_a_chunk_of_no_patch_is_a_lie(tools, source, lanes):
    source.spoil_chunk = lambda sent: replace(sent, patch_index=1)

    assert (await tools.failure(lanes, source)).reason is Reason.CHUNK_INVALID


async def test_two_transfers_at_once_do_not_meet(tools, source, lanes):
    both = await asyncio.gather(*(tools.pulled(lanes, source) for _ in range(2)))

    assert all(same(chunks, source.chunks) for chunks in both)


async def test_more_transfers_at_once_than_sources_are_kept_do_not_meet(tools, serve, lanes, case):
    """As from all ranks of a trainer."""
    count, begun, all_begun = 40, set(), asyncio.Event()
    sources = [await serve(lanes=[case[0]], seals=case[1]) for _ in range(count)]
    # So little is worth one connection.
    bound = TransferBound(patch_count=1, chunk_count=8, payload_nbytes=28_000)
    spec = replace(tools.spec, bound=bound)

    for source in sources:

        async def before(number, source=source):
            begun.add(source)
            if len(begun) == count:
                all_begun.set()
            await all_begun.wait()

        source.before = before
    pulled = await asyncio.gather(*(tools.pulled(lanes, each, spec) for each in sources))

    for source, chunks in zip(sources, pulled, strict=True):
        assert same(chunks, source.chunks)
        assert source.calls == ["list", "request"]


async def test_leaving_early_frees_what_was_kept(tools, source, lanes):
    async def stall(number):
        if number == 2:
            await asyncio.Event().wait()

    source.before = stall
    pulling = lanes.pull(source.address, tools.spec, tools.token)
    await anext(pulling)
    await anext(pulling)

    await pulling.aclose()

    await tools.settled(lambda: source.transfers[0].is_closed)
    source.before = source.at_once
    assert same(await tools.pulled(lanes, source), source.chunks)


async def test_a_cancelled_pull_frees_what_was_kept(tools, source, lanes):
    async def stall(number):
        del number
        reached.set()
        await asyncio.Event().wait()

    source.before, reached = stall, asyncio.Event()
    pulling = asyncio.create_task(tools.pulled(lanes, source))
    await reached.wait()
    pulling.cancel()
    await asyncio.wait([pulling])

    assert pulling.cancelled()
    await tools.settled(lambda: source.transfers[0].is_closed)


async def test_a_source_that_restarts_is_found_again(tools, source, lanes):
    await tools.pulled(lanes, source)
    await source.hosts.close()

    assert same(await tools.pulled(lanes, source), source.chunks)


async def test_a_failure_in_mid_transfer_keeps_its_reason(tools, source, lanes):
    async def evict(number):
        if number == 3:
            raise AstraflowError(Reason.VERSION_EVICTED, "gone meanwhile")

    source.before = evict

    assert (await tools.failure(lanes, source)).reason is Reason.VERSION_EVICTED


async def test_a_transfer_whose_turn_never_came_is_closed(tools, source):
    group = ConnectionGroup(Carrier(), b"")
    transfers = [source.open(tools.spec) for _ in range(2)]
    for each in transfers:
        group.begin(each)
    await group.close()
    await tools.settled(lambda: all(each.is_closed for each in transfers))
