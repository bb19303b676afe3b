"""TransferService, and its servers: of a publisher's versions, and of what a node passes on.

A version may be asked for before it is made. Then its chunks go out as they are encoded, and the
plan when the last one is: by then most of them have arrived. The reader verifies them by the plan,
and the plan by the root that the run registered.
"""

# ruff: noqa: N802 - methods are named by the contract
import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

from astraflow.client.loop_thread import LoopThread
from astraflow.codec.chunks import Chunk
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.versions import LaneKind
from astraflow.rpc.auth import TRANSFER_KEY, Context, has_secret, require_secret
from astraflow.rpc.server import RunningServer, Servicer, start_server
from astraflow.rpc.tls import Tls
from astraflow.transport.assembly import UNPLANNED_COUNT, UNPLANNED_NBYTES
from astraflow.transport.frames import source_lost
from astraflow.transport.groups import Transfers
from astraflow.transport.grpc_lane import encode_response
from astraflow.transport.hosts import DEFAULT_HOSTED, LaneHosts, is_encrypted
from astraflow.weights.heartbeat import with_heartbeats
from astraflow.weights.patches.patch import Patch, PatchName
from astraflow.weights.patches.store import PatchStore
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.relay import WeightRelay
from astraflow.wire.transfers import (
    SentItem,
    TransferPlan,
    TransferSpec,
    decode_transfer_spec,
    encode_lane_endpoint,
)
from astraflow.wire.weights import SentChunk, encode_layout
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)

# A store may have to encode a chunk again: that is done beside the event loop, some at a time.
_BATCH_COUNT: Final = 4

WeightSource = PatchStore | WeightRelay
"""What can be served: a publisher's store, or a relay."""


class WeightTransfer:
    """Sends what leads to a version; what that needs is kept until it is closed.

    Attributes:
        plan: What is sent; without patches it is not known yet, and its payload is a guess.
    """

    def __init__(self, source: WeightSource, spec: TransferSpec) -> None:
        """Look for what is wanted; where it may still come, `items` does.

        Raises:
            AstraflowError: VERSION_UNKNOWN, VERSION_EVICTED, PATCH_UNKNOWN, MEMORY_EXCEEDED,
                LAYOUT_MISMATCH; INVALID_FIELD for what is not sent ahead, LANE_UNAVAILABLE.
        """
        self.plan = TransferPlan(patches=(), chunk_count=0, payload_nbytes=0)
        self._source = source
        self._spec = spec
        self._patches: Sequence[Patch] = ()
        # Number of the patch in the plan, index of the chunk.
        self._left: list[tuple[int, int]] = []
        self._held = ExitStack()
        # The version that was being made, and the patch to it; of what is ahead.
        self._next = (-1, Patch())
        if spec.is_ahead:
            store = _require_next(source, spec)
            self._next = store.next
            self.plan = replace(self.plan, payload_nbytes=store.likely_nbytes)
        elif not isinstance(source, WeightRelay):
            self._find()

    def items(self) -> AsyncGenerator[SentItem]:
        """Yield the plan and its chunks, each when it is there; of what is ahead, chunks first.

        A relay to which nothing comes sends Waiting.

        Raises:
            AstraflowError: VERSION_EVICTED when a patch went meanwhile; SOURCE_UNREACHABLE when
                it did not come, or was made anew; what else the constructor raises.
        """
        if isinstance(self._source, WeightRelay):
            return with_heartbeats(self._relayed(self._source))
        return self._ahead(self._source) if self._spec.is_ahead else self._kept(self._source)

    def close(self) -> None:
        """Let go of what was kept; idempotent."""
        self._held.close()

    async def _relayed(self, relay: WeightRelay) -> AsyncGenerator[TransferPlan | SentChunk]:
        await relay.expect(self._spec)
        self._find()
        yield self.plan
        for number, index in self._left:
            chunk = await relay.chunk(self._patches[number], index)
            yield SentChunk(patch_index=number, chunk=chunk)

    async def _ahead(self, store: PatchStore) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield what is encoded while it is, and from the store what is left of it then."""
        version, (at, patch) = self._spec.version, self._next
        while at < version:
            await patch.ended()
            at, patch = store.next
        sent_count = sent_nbytes = 0
        is_sooner = store.is_sooner(self._spec)
        with patch.reading() as news:
            while at == version and not self._has_all(sent_count):
                news.clear()
                chunk = patch.chunks.get(sent_count) if is_sooner else None
                if is_sooner and patch.is_finished and not self.plan.patches:
                    store.note(self._spec)
                    yield self._planned((patch,))
                elif store.next[0] > version + 1:
                    # A slow reader keeps nothing in memory: what it lacks is the store's to have.
                    break
                elif chunk is not None and self._takes(chunk, sent_nbytes, sent_count):
                    sent_count, sent_nbytes = sent_count + 1, sent_nbytes + len(chunk.payload)
                    yield SentChunk(patch_index=0, chunk=chunk)
                elif patch.is_over:
                    break
                else:
                    await news.wait()
        if self._has_all(sent_count):
            return
        with_plan = not self.plan.patches
        if not sent_count and with_plan:
            self._find()
        else:
            if patch.failure or store.find(PatchName.of(patch.info)) is not patch:
                anew = source_lost(f"version {version} was made anew; ask for it again")
                raise patch.failure or anew
            self._planned((patch,))
            self._left = self._left[sent_count:]
            self._keep()
        async with aclosing(self._kept(store, with_plan=with_plan)) as items:
            async for item in items:
                yield item

    async def _kept(
        self, store: PatchStore, *, with_plan: bool = True
    ) -> AsyncGenerator[TransferPlan | SentChunk]:
        infos = [patch.info for patch in self._patches]
        is_kept = all(patch.is_kept for patch in self._patches)
        # What has become too old goes, however slowly it is read.
        self._patches = ()
        if with_plan:
            yield self.plan

        def take(place: tuple[int, int]) -> SentChunk:
            chunk = store.chunk(infos[place[0]], place[1])
            return SentChunk(patch_index=place[0], chunk=chunk)

        if is_kept:
            for place in self._left:
                yield take(place)
            return
        for first in range(0, len(self._left), _BATCH_COUNT):
            batch = map(take, self._left[first : first + _BATCH_COUNT])
            for sent in await asyncio.to_thread(list, batch):
                yield sent

    def _find(self) -> None:
        _require_layout(self._source, self._spec)
        self._planned(self._source.plan(self._spec))
        self._keep()

    def _planned(self, patches: Sequence[Patch]) -> TransferPlan:
        """Plan the chunks of some patches that the reader wants and does not have, in order."""
        spec = self._spec
        self._patches = patches
        self._left = [
            (number, index)
            for number, patch in enumerate(patches)
            for index in spec.wanted(patch.root, patch.info.chunk_count)
        ]
        nbytes = sum(
            patch.payload_nbytes([index for at, index in self._left if at == number])
            for number, patch in enumerate(patches)
        )
        if 0 < spec.max_memory_nbytes < nbytes:
            raise AstraflowError(
                Reason.MEMORY_EXCEEDED,
                f"the transfer has {nbytes} bytes, the puller takes {spec.max_memory_nbytes}",
            )
        self.plan = replace(
            self.plan,
            patches=tuple(patch.index for patch in patches),
            chunk_count=len(self._left),
            payload_nbytes=nbytes,
        )
        return self.plan

    def _keep(self) -> None:
        self._held.enter_context(self._source.reading([patch.info for patch in self._patches]))

    def _has_all(self, sent_count: int) -> bool:
        return bool(self.plan.patches) and sent_count == self.plan.chunk_count

    def _takes(self, chunk: Chunk, sent_nbytes: int, sent_count: int) -> bool:
        """Whether a reader takes one more chunk: before the plan that is bounded."""
        most = min(UNPLANNED_NBYTES, self._spec.max_memory_nbytes or UNPLANNED_NBYTES)
        is_bounded = sent_nbytes + len(chunk.payload) <= most and sent_count < UNPLANNED_COUNT
        return bool(self.plan.patches) or is_bounded


def _require_next(source: WeightSource, spec: TransferSpec) -> PatchStore:
    if isinstance(source, WeightRelay):
        raise AstraflowError(
            Reason.LANE_UNAVAILABLE,
            "versions are sent ahead by trainers alone, over TCP; ask for one that there is",
        )
    _require_layout(source, spec)
    if spec.base_version is None or spec.version != spec.base_version + 1:
        raise AstraflowError(
            Reason.INVALID_FIELD, "ahead leads from a version to the next one, no further"
        )
    if spec.want_chunks or spec.have_chunks:
        raise AstraflowError(Reason.INVALID_FIELD, "ahead comes whole: name no chunks")
    newest = source.history.newest
    if newest is None or spec.version > newest + 1:
        raise AstraflowError(
            Reason.VERSION_UNKNOWN,
            f"version {spec.version} does not come next here; the newest is {newest}",
            metadata={"version": str(spec.version)},
        )
    return source


def _require_layout(source: WeightSource, spec: TransferSpec) -> None:
    if source.frame is None:
        raise AstraflowError(Reason.LAYOUT_UNKNOWN, "nothing has been pulled here yet")
    if spec.layout_digest and spec.layout_digest != source.frame.digest:
        raise AstraflowError(Reason.LAYOUT_MISMATCH, "the puller has another layout")


class TransferServer:
    """Serves what sources have, over gRPC and over lanes.

    Until `set_transfer_token` is called nobody is let in.

    Attributes:
        hosts: Of lanes beside gRPC; there are none before it is started.
    """

    def __init__(
        self,
        sources: Mapping[PolicyId, WeightSource],
        *,
        lanes: Sequence[LaneKind] = (),
        encrypts: bool | None = None,
    ) -> None:
        self._transfer_tokens: tuple[bytes, ...] = ()
        self.hosts = LaneHosts(
            Transfers(open=self.open_transfer, secrets=lambda: self._transfer_tokens)
        )
        self._sources = sources
        self._lanes = lanes
        self._encrypts = encrypts
        self._server: RunningServer | None = None

    @property
    def endpoint(self) -> str:
        """host:port, as others dial it."""
        if self._server is None:
            raise AstraflowError(Reason.NOT_READY, "the weight server has not been started")
        return self._server.address

    def set_transfer_token(self, token: bytes) -> None:
        """Let in who has this secret of the run, or the one before, which some still use."""
        if token not in self._transfer_tokens[:1]:
            self._transfer_tokens = (token, *self._transfer_tokens[:1])

    async def start(
        self, *, listen: str = "127.0.0.1:0", advertise: str | None = None, tls: Tls | None = None
    ) -> None:
        """Start to serve; for what it is given and raises see `rpc.server.start_server`."""
        self._server = await start_server(
            [Servicer(add=add_TransferServiceServicer_to_server, methods=self)],
            listen=listen,
            advertise=advertise,
            tls=tls,
            knows=self._knows,
        )
        await self.hosts.start(
            listen=listen,
            advertised=self._server.address,
            lanes=self._lanes,
            seals=is_encrypted(self._encrypts, tls),
        )

    def _knows(self, context: Context) -> bool:
        return has_secret(context, TRANSFER_KEY, *self._transfer_tokens)

    async def close(self) -> None:
        """End what is served, after two seconds at most."""
        if self._server is not None:
            await self._server.stop(grace_s=2.0)
            self._server = None
            await self.hosts.close()

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncGenerator[pb.PullResponse]:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens)
        spec = decode_transfer_spec(request.spec)
        if spec.is_ahead:
            raise AstraflowError(
                Reason.LANE_UNAVAILABLE, "over connections that stand alone is anything sent ahead"
            )
        with closing(self.open_transfer(spec)) as transfer:
            async with aclosing(transfer.items()) as items:
                async for item in items:
                    yield encode_response(item)

    async def ListLanes(self, request: pb.ListLanesRequest, context: Any) -> pb.ListLanesResponse:
        del request
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens)
        endpoints = map(encode_lane_endpoint, self.hosts.endpoints)
        return pb.ListLanesResponse(endpoints=endpoints)

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens)
        for source in self._sources.values():
            if source.frame is not None and source.frame.digest == request.layout_digest:
                return pb.GetLayoutResponse(layout=encode_layout(source.frame.layout))
        raise AstraflowError(Reason.LAYOUT_UNKNOWN, "no such layout is here")

    def open_transfer(self, spec: TransferSpec) -> WeightTransfer:
        source = self._sources.get(PolicyId(spec.policy_id))
        if source is None:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN,
                f"{', '.join(self._sources)} is served here, not {spec.policy_id}",
            )
        return WeightTransfer(source, spec)


class RelayServer(TransferServer):
    """Serves what the pullers of a node pull, over gRPC and TCP.

    Attributes:
        relays: By policy.
    """

    def __init__(
        self,
        policy_ids: Iterable[PolicyId],
        *,
        lanes: Sequence[LaneKind] | None = None,
        encrypts: bool | None = None,
        wait_s: float = 5.0,
    ) -> None:
        """Relay nothing yet.

        Args:
            policy_ids: Whose versions the node pulls.
            lanes: Of these TCP is served beside gRPC; None: it is.
            encrypts: Whether lanes are encrypted; None: beside TLS.
            wait_s: How long a version may be asked for before its pull begins here.
        """
        self.relays = {policy_id: WeightRelay(wait_s=wait_s) for policy_id in policy_ids}
        chosen = DEFAULT_HOSTED if lanes is None else lanes
        tcp = [lane for lane in chosen if lane is LaneKind.TCP]
        super().__init__(self.relays, lanes=tcp, encrypts=encrypts)


class WeightServer(TransferServer):
    """Serves what a publisher holds, beside a trainer that blocks: from a thread's event loop."""

    def __init__(
        self,
        publisher: WeightPublisher,
        *,
        listen: str = "127.0.0.1:0",
        advertise: str | None = None,
        tls: Tls | None = None,
        loop: LoopThread | None = None,
        lanes: Sequence[LaneKind] | None = None,
        encrypts: bool | None = None,
    ) -> None:
        """Listen on nothing; `with` starts it.

        Args:
            publisher: Whose versions are served.
            listen: host:port; port 0 takes a free one.
            advertise: How others dial it: auto, fqdn, a host or IP; None: as listened on.
            tls: None: plain text.
            loop: Shared with a TrainerClient; None: one of its own.
            lanes: Served beside gRPC; None: shared memory and TCP.
            encrypts: Whether lanes that leave the host are encrypted; None: beside TLS.
        """
        chosen = DEFAULT_HOSTED if lanes is None else lanes
        super().__init__({publisher.policy_id: publisher.store}, lanes=chosen, encrypts=encrypts)
        self._begin = partial(self.start, listen=listen, advertise=advertise, tls=tls)
        self._owns_loop = loop is None
        self._loop = loop or LoopThread(name="astraflow-weights")

    def __enter__(self) -> Self:
        if self._owns_loop:
            self._loop.start()
        self._loop.call(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._loop.call(self.close())
        if self._owns_loop:
            self._loop.close()
