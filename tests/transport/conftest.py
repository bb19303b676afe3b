"""A source on real sockets with every lane, whose chunks a test chooses."""

import asyncio
import hashlib

import pytest

from astraflow.codec.chunks import Chunk, ChunkHeader, Encoding
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype
from astraflow.core.versions import CodecProfile, PatchInfo
from astraflow.rpc.auth import TRANSFER_KEY, require_secret
from astraflow.rpc.server import Servicer, start_server
from astraflow.transport.groups import Transfers
from astraflow.transport.grpc_lane import encode_response
from astraflow.transport.hosts import DEFAULT_HOSTED, LaneHosts
from astraflow.transport.lanes import Lanes
from astraflow.wire.transfers import (
    TransferPlan,
    TransferSpec,
    decode_transfer_spec,
    encode_lane_endpoint,
)
from astraflow.wire.weights import PatchIndex, SentChunk
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)

TOKEN = b"secret of the run"
SPEC = TransferSpec(policy_id="solver", version=3, base_version=1)
ROOT = bytes(range(32))


def payload_of(index, nbytes):
    seed = hashlib.sha256(str(index).encode()).digest()
    return (seed * (nbytes // 32 + 1))[:nbytes]


def chunk_of(index, nbytes):
    return Chunk(
        header=ChunkHeader(
            index=index,
            offset=index << 22,
            nbytes=max(nbytes, 64),
            dtype=Dtype.BF16,
            encoding=Encoding.DENSE if nbytes else Encoding.UNCHANGED,
            payload_nbytes=nbytes,
        ),
        payload=payload_of(index, nbytes),
    )


def patch_of(chunks):
    return PatchInfo(
        base_version=1,
        version=3,
        profile=CodecProfile.FAST,
        codec_version=1,
        root_digest=ROOT,
        chunk_count=len(chunks),
        payload_nbytes=sum(len(each.payload) for each in chunks),
    )


class ScriptedTransfer:
    """Sends the chunks of a source that a puller lacks."""

    def __init__(self, source, spec):
        self.source = source
        self.is_closed = False
        have = {each.root_digest: each for each in spec.have_chunks}.get(ROOT, ())
        self.sent = [each for each in source.chunks if each.header.index not in have]
        patch = patch_of(source.chunks)
        index = PatchIndex(patch=patch, chunk_digests=(bytes(32),) * len(source.chunks))
        self.plan = source.spoil_plan(
            TransferPlan(
                patches=(index,),
                chunk_count=len(self.sent),
                payload_nbytes=sum(len(each.payload) for each in self.sent),
            )
        )

    async def items(self):
        yield self.plan
        for number, chunk in enumerate(self.sent):
            await self.source.before(number)
            self.source.sent_count += 1
            yield self.source.spoil_chunk(SentChunk(patch_index=0, chunk=chunk))

    def close(self):
        self.is_closed = True


class Source:
    """Serves scripted chunks over gRPC and all lanes, with the faults that a test asks for."""

    def __init__(self):
        self.chunks = [chunk_of(index, 1000 * index) for index in range(8)]
        self.transfers, self.calls, self.sent_count = [], [], 0
        self.spoil_plan = self.spoil_chunk = lambda item: item
        self.before = self.at_once

    async def at_once(self, number):
        del number

    async def start(self, lanes=DEFAULT_HOSTED, listen="127.0.0.1:0", *, seals=False):
        self.hosts = LaneHosts(Transfers(open=self.open, secrets=lambda: [TOKEN]))
        self.server = await start_server(
            [Servicer(add=add_TransferServiceServicer_to_server, methods=self)], listen=listen
        )
        self.address = self.server.address
        await self.hosts.start(
            listen=listen,
            advertised=self.address,
            lanes=lanes,
            seals=seals,
        )

    async def stop(self):
        await self.hosts.close()
        await self.server.stop()

    def open(self, spec):
        self.calls.append("request")
        return self._opened(spec)

    def _opened(self, spec):
        if spec.version != SPEC.version:
            raise AstraflowError(Reason.VERSION_UNKNOWN, "only version 3 is here")
        transfer = ScriptedTransfer(self, spec)
        self.transfers.append(transfer)
        return transfer

    async def ListLanes(self, request, context):  # noqa: N802
        del request
        self.calls.append("list")
        require_secret(context, TRANSFER_KEY, TOKEN)
        return pb.ListLanesResponse(endpoints=map(encode_lane_endpoint, self.hosts.endpoints))

    async def Pull(self, request, context):  # noqa: N802
        self.calls.append("pull")
        require_secret(context, TRANSFER_KEY, TOKEN)
        transfer = self._opened(decode_transfer_spec(request.spec))
        try:
            async for item in transfer.items():
                yield encode_response(item)
        finally:
            transfer.close()


@pytest.fixture
async def serve():
    """Start sources."""
    started = []

    async def start(**settings):
        source = Source()
        await source.start(**settings)
        started.append(source)
        return source

    yield start
    for source in started:
        await source.stop()


@pytest.fixture
async def open_lanes():
    """Make Lanes."""
    made = []

    def make(*lanes, **settings):
        each = Lanes(lanes=lanes or None, **settings)
        made.append(each)
        return each

    yield make
    for each in made:
        await each.close()


@pytest.fixture
def tools():
    """What tests of this folder call."""

    class Tools:
        token = TOKEN
        spec = SPEC
        root = ROOT
        chunk_of = staticmethod(chunk_of)
        patch_of = staticmethod(patch_of)

        @staticmethod
        async def pulled(lanes, source, spec=SPEC, token=TOKEN):
            first, *rest = [item async for item in lanes.pull(source.address, spec, token)]
            assert isinstance(first, TransferPlan)
            return {each.chunk.header.index: each.chunk for each in rest}

        @staticmethod
        async def failure(lanes, source, spec=SPEC, token=TOKEN):
            with pytest.raises(AstraflowError) as caught:
                await Tools.pulled(lanes, source, spec, token)
            return caught.value

        @staticmethod
        async def settled(condition):
            """Wait until something that another task does has been done."""
            async with asyncio.timeout(60):
                while not condition():  # noqa: ASYNC110 - nothing to wait on
                    await asyncio.sleep(0.005)

    return Tools
