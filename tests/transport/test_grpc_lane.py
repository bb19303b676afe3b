"""The gRPC lane against sources that answer, do not, or talk nonsense."""

import asyncio

import pytest
from grpc import StatusCode

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.auth import TRANSFER_KEY, secret_of
from astraflow.rpc.server import Servicer, start_server
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.wire.transfers import TransferPlan, TransferSpec, decode_transfer_spec
from astraflow.wire.weights import SentChunk
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)

SPEC = TransferSpec(policy_id="solver", version=3, base_version=1)


class Source:
    """Says what a test tells it to say."""

    def __init__(self):
        self.script, self.specs, self.secrets = [], [], []
        self.cancelled = asyncio.Event()

    async def Pull(self, request, context):  # noqa: N802
        self.specs.append(decode_transfer_spec(request.spec))
        self.secrets.append(secret_of(context, TRANSFER_KEY))
        try:
            for each in self.script:
                match each:
                    case StatusCode():
                        await context.abort(each, "as the test asked for")
                    case AstraflowError():
                        raise each
                    case "silence":
                        await asyncio.Event().wait()
                    case _:
                        yield each
        finally:
            self.cancelled.set()

    async def ListLanes(self, request, context):  # noqa: N802
        return pb.ListLanesResponse(endpoints=self.script)

    async def GetLayout(self, request, context):  # noqa: N802
        raise AstraflowError(Reason.LAYOUT_UNKNOWN, "no layout here")


@pytest.fixture
async def source():
    source = Source()
    servicer = Servicer(add=add_TransferServiceServicer_to_server, methods=source)
    async with await start_server([servicer]) as server:
        source.address = server.address
        yield source


@pytest.fixture
async def lane():
    lane = GrpcLane()
    yield lane
    await lane.close()


def plan():
    return pb.PullResponse(plan={})


def chunk(**fields):
    header = {"nbytes": 4, "dtype": 11, "encoding": 2, "compression": 1, "payload_nbytes": 4}
    return pb.PullResponse(chunk={"header": {**header, **fields}, "payload": b"abcd"})


async def pulled(lane, address):
    return [item async for item in lane.pull(address, SPEC, b"secret")]


async def failure(lane, address):
    with pytest.raises(AstraflowError) as caught:
        await pulled(lane, address)
    return caught.value


async def test_plan_and_chunks_come_as_they_were_sent(lane, source):
    source.script = [plan(), chunk(), chunk(index=1)]

    first, *rest = await pulled(lane, source.address)

    assert isinstance(first, TransferPlan)
    assert [each.chunk.header.index for each in rest] == [0, 1]
    assert all(isinstance(each, SentChunk) and each.chunk.payload == b"abcd" for each in rest)
    assert (source.specs, source.secrets) == ([SPEC], [b"secret"])


async def test_lanes_that_a_later_release_has_named_are_passed_over(lane, source):
    source.script = [{"lane": 99, "address": "shm2:x"}, {"lane": 2, "address": "h:1"}]

    (found,) = await lane.list_lanes(source.address, b"secret")

    assert found.address == "h:1"


async def test_an_answer_of_the_source_keeps_its_reason(lane, source):
    source.script = [AstraflowError(Reason.VERSION_EVICTED, "gone")]

    assert (await failure(lane, source.address)).reason is Reason.VERSION_EVICTED


async def test_a_cut_is_a_source_that_cannot_be_reached(lane, source):
    source.script = [plan(), StatusCode.UNAVAILABLE]

    error = await failure(lane, source.address)

    assert (error.reason, error.retryable) == (Reason.SOURCE_UNREACHABLE, True)
    assert source.address in error.message


async def test_silence_is_a_timeout_and_ends_the_call(source):
    source.script = [plan(), "silence"]
    lane = GrpcLane(stall_timeout_s=0.3)

    error = await failure(lane, source.address)

    assert (error.reason, error.retryable) == (Reason.SOURCE_TIMEOUT, True)
    if source.specs:
        await source.cancelled.wait()
    await lane.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        pb.PullResponse(),
        chunk(dtype=0),
        chunk(encoding=77),
        chunk(index=-1),
        pb.PullResponse(plan={"patches": [{}]}),
    ],
)
async def test_a_message_that_cannot_be_read_is_a_bad_chunk(lane, source, nonsense):
    source.script = [plan(), nonsense]

    assert (await failure(lane, source.address)).reason is Reason.CHUNK_INVALID


async def test_leaving_early_ends_the_call(lane, source):
    source.script = [plan(), "silence"]
    pulling = lane.pull(source.address, SPEC, b"secret")
    await anext(pulling)

    await pulling.aclose()

    await source.cancelled.wait()


async def test_layouts_fail_with_a_reason_too(lane, source):
    with pytest.raises(AstraflowError) as caught:
        await lane.get_layout(source.address, bytes(32), b"secret")
    assert caught.value.reason is Reason.LAYOUT_UNKNOWN


async def test_connections_are_kept_but_not_without_end(lane, source):
    source.script = [plan()]
    await pulled(lane, source.address)
    ((key, channel),) = lane._channels.items()
    for port in range(40):
        async with lane._stub(f"127.0.0.1:{port + 1}", nbytes=1):
            await pulled(lane, source.address)

    assert lane._channels[key] is channel
    assert len(lane._channels) == 32
