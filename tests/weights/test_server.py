"""A trainer that blocks serves weights from a thread; only members of the run are let in."""

import gc
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from astraflow.client.loop_thread import LoopThread
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.rpc.auth import transfer_metadata
from astraflow.rpc.channel import dial
from astraflow.rpc.errors import raised_from
from astraflow.transport.lanes import RECEIVED_NBYTES
from astraflow.weights.fetch.lanes import AnyLane
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.patches import store as patch_store
from astraflow.weights.serve.server import RelayServer, TransferServer, WeightServer
from astraflow.wire.transfers import TransferSpec
from astraflow.wire.weights import decode_layout
from astraflow_proto.weights.v1 import patch_pb2
from astraflow_proto.weights.v1 import transfer_pb2 as transfers
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import TransferServiceStub


@pytest.fixture
def server(training):
    with WeightServer(training.publisher) as server:
        server.set_transfer_token(training.token)
        yield server


@pytest.fixture
async def stub(server):
    channel = dial(server.endpoint)
    yield TransferServiceStub(channel)
    await channel.close()


async def answer(call):
    with pytest.raises(AioRpcError) as caught:
        await call
    return raised_from(caught.value)


async def everything(call):
    return [response async for response in call]


def spec_for(training, **fields):
    fields = {"policy_id": training.policy_id, "version": 0, **fields}
    return pb.PullRequest(spec=transfers.TransferSpec(**fields))


async def pulled(stub, training, **fields):
    metadata = transfer_metadata(training.token)
    return await everything(stub.Pull(spec_for(training, **fields), metadata=metadata))


async def refusal(stub, training, **fields):
    with pytest.raises(AioRpcError) as caught:
        await pulled(stub, training, **fields)
    return raised_from(caught.value).reason


def indexes(responses):
    return [each.chunk.header.index for each in responses[1:]]


async def test_the_plan_comes_first_and_says_what_follows(training, stub):
    info = training.publish()

    plan, *chunks = await pulled(stub, training)

    assert plan.plan.chunk_count == len(chunks) == info.patches[0].chunk_count
    assert plan.plan.payload_nbytes == sum(len(each.chunk.payload) for each in chunks)


async def test_a_part_of_the_chunks_can_be_asked_for(training, stub):
    root = training.publish().patches[0].root_digest

    def chunks(first, count):
        runs = [transfers.IndexRange(first=first, count=count)]
        return [transfers.ChunkSet(root_digest=root, indexes=runs)]

    assert indexes(await pulled(stub, training)) == [0, 1, 2, 3, 4]
    assert indexes(await pulled(stub, training, want_chunks=chunks(1, 2))) == [1, 2]
    assert indexes(await pulled(stub, training, have_chunks=chunks(0, 2))) == [2, 3, 4]
    assert indexes(
        await pulled(stub, training, want_chunks=chunks(1, 2), have_chunks=chunks(2, 9))
    ) == [1]
    everything_of_it = [transfers.ChunkSet(root_digest=root)]
    assert indexes(await pulled(stub, training, have_chunks=everything_of_it)) == []


async def test_what_cannot_be_served_is_refused_with_a_reason(training, stub):
    training.publish()
    training.publish()

    assert await refusal(stub, training, version=2) is Reason.VERSION_UNKNOWN
    assert await refusal(stub, training, policy_id="judge") is Reason.VERSION_UNKNOWN
    assert await refusal(stub, training, layout_digest=bytes(32)) is Reason.LAYOUT_MISMATCH
    assert await refusal(stub, training, max_memory_nbytes=100) is Reason.MEMORY_EXCEEDED
    assert await refusal(stub, training, policy_id="") is Reason.INVALID_FIELD
    assert await refusal(stub, training, base_version=1) is Reason.PATCH_UNKNOWN
    compact = [patch_pb2.CODEC_PROFILE_COMPACT]
    assert await refusal(stub, training, profiles=compact) is Reason.PATCH_UNKNOWN
    nonsense = [transfers.ChunkSet(root_digest=b"short")]
    assert await refusal(stub, training, have_chunks=nonsense) is Reason.INVALID_FIELD
    twice = [transfers.ChunkSet(root_digest=bytes(32))] * 2
    assert await refusal(stub, training, want_chunks=twice) is Reason.INVALID_FIELD
    assert await refusal(stub, training, have_chunks=twice) is Reason.INVALID_FIELD


async def test_a_profile_that_is_named_again_and_again_is_one(training, stub):
    training.publish()

    fast = [patch_pb2.CODEC_PROFILE_FAST] * (1 << 20)
    assert indexes(await pulled(stub, training, profiles=fast)) == [0, 1, 2, 3, 4]


async def test_a_reader_that_stands_still_keeps_no_patch_in_memory(tools, monkeypatch):
    monkeypatch.setattr(patch_store, "_SPARE_NBYTES", 0)
    training = tools.training(keep_patches=2)
    training.publish()
    training.publish(share=0.3, is_noise=True)
    server = TransferServer({training.policy_id: training.store})
    spec = TransferSpec(policy_id=training.policy_id, version=1, base_version=0)
    (patch,) = map(weakref.ref, training.store.plan(spec))
    reading = server.open_transfer(spec)
    items = reading.items()
    await anext(items)

    for _ in range(8):
        training.publish(share=0.3, is_noise=True)
    gc.collect()

    assert patch() is None
    with pytest.raises(AstraflowError) as caught:
        await anext(items)
    assert caught.value.reason is Reason.VERSION_EVICTED
    reading.close()


async def test_layouts_are_known_by_their_digests(training, stub):
    info = training.publish()
    metadata = transfer_metadata(training.token)

    layout = await stub.GetLayout(
        pb.GetLayoutRequest(layout_digest=info.layout_digest), metadata=metadata
    )

    assert decode_layout(layout.layout) == training.layout
    unknown = await answer(stub.GetLayout(pb.GetLayoutRequest(), metadata=metadata))
    assert unknown.reason is Reason.LAYOUT_UNKNOWN


async def test_the_lanes_beside_grpc_are_told_who_knows_the_secret(training, stub):
    metadata = transfer_metadata(training.token)

    listed = await stub.ListLanes(pb.ListLanesRequest(), metadata=metadata)
    error = await answer(stub.ListLanes(pb.ListLanesRequest(), metadata=transfer_metadata(b"x")))

    assert [each.lane for each in listed.endpoints] == [transfers.LANE_SHM, transfers.LANE_TCP]
    assert error.reason is Reason.TOKEN_INVALID


async def test_nobody_is_let_in_without_the_secret_of_the_run(training):
    training.publish()
    with WeightServer(training.publisher) as server:
        channel = dial(server.endpoint)
        stub = TransferServiceStub(channel)
        for metadata in ((), transfer_metadata(b""), transfer_metadata(training.token)):
            with pytest.raises(AioRpcError) as caught:
                await everything(stub.Pull(spec_for(training), metadata=metadata))
            assert caught.value.code() is StatusCode.UNAUTHENTICATED
        await channel.close()


async def test_a_new_secret_lets_the_one_before_live_on_and_ends_older_ones(training, server, stub):
    training.publish()
    server.set_transfer_token(b"second")
    assert await pulled(stub, training)
    server.set_transfer_token(b"third")
    assert await refusal(stub, training) is Reason.TOKEN_INVALID


def test_a_port_in_use_is_a_clear_error(training, server):
    with (
        pytest.raises(AstraflowError, match="cannot listen"),
        WeightServer(training.publisher, listen=server.endpoint),
    ):
        pass


def test_the_loop_of_a_client_can_be_shared(training):
    with LoopThread() as loop:
        with WeightServer(training.publisher, loop=loop) as server:
            assert server.endpoint.startswith("127.0.0.1:")
        assert loop.call(_still_runs())
    with pytest.raises(AstraflowError, match="not been started"):
        _ = server.endpoint


async def _still_runs():
    return True


async def test_publishing_goes_on_while_versions_are_pulled(training, server, stub):
    training.publish()
    then = training.tensors["a"]
    metadata = transfer_metadata(training.token)
    call = stub.Pull(spec_for(training), metadata=metadata)
    first = await call.read()
    for _ in range(3):
        training.publish()
    rest = [await call.read() for _ in range(first.plan.chunk_count)]

    assert (np.frombuffer(rest[0].chunk.payload, np.uint16) == then.reshape(-1)).all()


async def test_beside_tls_versions_come_over_a_lane_that_is_encrypted(training, tools, pem):
    with WeightServer(training.publisher, tls=pem, lanes=[LaneKind.TCP]) as server:
        server.set_transfer_token(training.token)
        relays = RelayServer([training.policy_id], lanes=[LaneKind.TCP])
        relay = relays.relays[training.policy_id]
        lane = AnyLane(tls=pem, lanes=[LaneKind.TCP])
        node = WeightPuller(training.policy_id, lane=lane, relay=relay)
        far = WeightPuller(training.policy_id, lane=AnyLane(tls=pem, lanes=[LaneKind.TCP]))
        await relays.start(tls=pem)
        relays.set_transfer_token(training.token)
        before = Counter(RECEIVED_NBYTES)
        try:
            for source, puller in ((server.endpoint, node), (relays.endpoint, far)):
                training.endpoints = [source.replace("127.0.0.1", "localhost")]
                info = training.infos.get(0) or training.publish()
                info = replace(info, sources=tools.sources(training.endpoints))
                pulled = await puller.pull(info, training.infos, training.token)
                assert training.is_live(tools.live(pulled.update))
        finally:
            for puller in (node, far):
                await puller.close()
            await relays.close()
    came = RECEIVED_NBYTES - before
    assert came[LaneKind.TCP] == 2 * training.infos[0].patches[0].payload_nbytes
    assert not came[LaneKind.GRPC]


async def test_a_source_in_the_clear_is_asked_over_grpc_where_lanes_must_be_encrypted(
    training, tools, server
):
    training.endpoints = [server.endpoint]
    info = training.publish()
    lane = AnyLane(lanes=[LaneKind.TCP], encrypts=True)
    puller = WeightPuller(training.policy_id, lane=lane)
    before = Counter(RECEIVED_NBYTES)
    try:
        pulled = await puller.pull(info, training.infos, training.token)
    finally:
        await puller.close()
    assert training.is_live(tools.live(pulled.update))
    assert not (RECEIVED_NBYTES - before)[LaneKind.TCP]
