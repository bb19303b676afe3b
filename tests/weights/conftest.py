"""A training whose weights move, and sources on real sockets that lie, cut and stall on demand."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from grpc import StatusCode

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import SourceInfo, SourceKind, SourceState
from astraflow.rpc.server import Servicer, start_server
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.fetch.sources import FetchSettings
from astraflow.weights.patches.patch import Patch
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import TransferServer
from astraflow.wire.transfers import TransferSpec, decode_transfer_spec
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)

TOKEN = b"transfer"
POLICY = PolicyId("solver")
LAYOUT = Layout.of(
    [
        ("a", Dtype.BF16, (300, 40)),
        ("b", Dtype.F32, (77,)),
        ("c", Dtype.BF16, ()),
        ("d", Dtype.F8_E4M3, (1001,)),
        ("e", Dtype.I64, (5,)),
        ("f", Dtype.F32, (0, 4)),
    ]
)


class Training:
    """A publisher whose weights move a little with each version."""

    token = TOKEN
    policy_id = POLICY

    def __init__(self, layout=LAYOUT, *, seed=0, **kept):
        self.rng = np.random.default_rng(seed)
        self.layout = layout
        self.publisher = WeightPublisher(POLICY, layout, **kept)
        self.tensors = {
            spec.name: self.rng.integers(0, 1 << 7, spec.shape).astype(spec.dtype.bits)
            for spec in layout.tensors
        }
        self.infos = {}
        self.endpoints = []

    @property
    def store(self):
        return self.publisher.store

    def publish(self, *, share=0.02, is_noise=False):
        """Publish weights of which a share moved: a unit up, or anywhere."""
        for name, bits in self.tensors.items():
            moved = self.rng.random(bits.shape) < share
            noise = self.rng.integers(0, 1 << 8 * bits.itemsize - 1, bits.shape)
            self.tensors[name] = np.where(moved, noise if is_noise else bits + 1, bits).astype(
                bits.dtype
            )
        version = len(self.infos)
        info = self.publisher.publish(version, self.tensors, step=version)
        self.infos[version] = replace(info, sources=sources(self.endpoints))
        return self.infos[version]

    def plan(self, version, base_version, **told):
        """The patches that a reader would be sent."""
        return self.store.plan(asked(version, base_version, **told))

    def add(self, patch):
        """Offer one more patch, and tell of it."""
        self.store.offer([patch])
        info = self.infos[patch.info.version]
        self.infos[info.version] = replace(info, patches=(*info.patches, patch.info))
        return self.infos[info.version]

    def chunks_of(self, patch):
        """All chunks of a stored patch, made again where they are not kept."""
        count = patch.info.chunk_count
        return tuple(self.store.chunk(patch.info, index) for index in range(count))

    def complete(self, patch):
        """A stored patch with all its chunks."""
        return Patch(patch.index, dict(enumerate(self.chunks_of(patch))))

    def flat(self):
        """The newest version as one flat state."""
        flat = np.zeros(self.layout.nbytes, np.uint8)
        for name, bits in self.tensors.items():
            self.layout.view(flat, name)[...] = bits
        return flat

    def is_live(self, tensors):
        return tensors.keys() == self.tensors.keys() and all(
            (tensors[name] == bits).all() and tensors[name].shape == bits.shape
            for name, bits in self.tensors.items()
        )


def asked(version, base_version, **told):
    return TransferSpec(policy_id=POLICY, version=version, base_version=base_version, **told)


def sources(endpoints):
    return tuple(
        SourceInfo(kind=SourceKind.ORIGIN, state=SourceState.LIVE, endpoint=each)
        for each in endpoints
    )


class FaultySource:
    """The real servicer of a store, with faults that a test asks for.

    Attributes:
        asked: Set by every pull.
        requests: Specs of the pulls so far.
        chunk_count: Chunks sent so far.
        signed: Set by every sign that it waits itself.
        sign_count: Such signs so far.
    """

    def __init__(self, store):
        self.servicer = TransferServer({POLICY: store})
        self.servicer.set_transfer_token(TOKEN)
        self.requests, self.chunk_count, self.address = [], 0, ""
        self.asked, self.signed = asyncio.Event(), asyncio.Event()
        self.sign_count = 0
        self.spoil_plan = self.spoil_chunk = self.spoil_layout = lambda message: message
        self.cuts = []
        self.stalls = self.ends_early = False

    async def start(self):
        servicer = Servicer(add=add_TransferServiceServicer_to_server, methods=self)
        self._server = await start_server([servicer])
        self.address = self._server.address

    async def stop(self):
        await self._server.stop()

    async def GetLayout(self, request, context):  # noqa: N802
        response = await self.servicer.GetLayout(request, context)
        self.spoil_layout(response.layout)
        return response

    async def Pull(self, request, context):  # noqa: N802
        self.requests.append(decode_transfer_spec(request.spec))
        self.asked.set()
        cut_after = self.cuts.pop(0) if self.cuts else None
        sent = 0
        async for response in self.servicer.Pull(request, context):
            if response.WhichOneof("item") == "plan":
                response.plan.CopyFrom(self.spoil_plan(response.plan))
                yield response
                continue
            if response.WhichOneof("item") == "waiting":
                self.sign_count += 1
                self.signed.set()
                yield response
                continue
            if self.stalls:
                await asyncio.Event().wait()
            if self.ends_early:
                return
            if sent == cut_after:
                await context.abort(StatusCode.UNAVAILABLE, "cut by the test")
            response.chunk.CopyFrom(self.spoil_chunk(response.chunk))
            yield response
            sent, self.chunk_count = sent + 1, self.chunk_count + 1


def flipped(message):
    """Flip one bit of a chunk's payload."""
    payload = bytearray(message.payload)
    if payload:
        payload[len(payload) // 2] ^= 16
    message.payload = bytes(payload)
    return message


def live(update, tensors=None):
    """Apply an update as an engine would."""
    tensors = {} if tensors is None else {name: bits.copy() for name, bits in tensors.items()}
    for each in update.tensors:
        if each.indices is None:
            tensors[each.spec.name] = each.values.reshape(each.spec.shape)
        else:
            assert (np.diff(each.indices) > 0).all()
            tensors[each.spec.name].reshape(-1)[each.indices] = each.values
    return tensors


@pytest.fixture
def tools():
    """What tests of this folder call."""

    class Tools:
        training = Training
        flipped = staticmethod(flipped)
        live = staticmethod(live)
        sources = staticmethod(sources)

    return Tools


@pytest.fixture
def training():
    return Training()


@pytest.fixture
async def serve(training):
    """Start sources; the first one serves the training unless told otherwise."""
    started = []

    async def start(store=None):
        source = FaultySource(store or training.store)
        await source.start()
        started.append(source)
        training.endpoints.append(source.address)
        return source

    yield start
    for source in started:
        await source.stop()


@pytest.fixture
async def puller():
    puller = WeightPuller(POLICY, settings=FetchSettings(shared_nbytes=1 << 40))
    yield puller
    await puller.close()
