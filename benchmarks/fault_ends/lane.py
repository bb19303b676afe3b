"""A lane without sockets: the real servicer's transfers as wire bytes, with a liar among them."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from random import Random
from typing import Any, Final

from google.protobuf.message import DecodeError

from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import Layout
from astraflow.transport import grpc_lane
from astraflow.wire.transfers import (
    TransferPlan,
    TransferSpec,
    decode_transfer_spec,
    encode_transfer_spec,
)
from astraflow.wire.weights import SentChunk, decode_layout, encode_layout
from astraflow_proto.weights.v1 import layout_pb2, transfer_pb2
from astraflow_proto.weights.v1.transfer_service_pb2 import PullResponse
from fault_ends.damage import DAMAGES, Damage, Transfer, Wires, flipped, set_any
from fault_ends.world import World

HONEST: Final = "honest:1"


class FaultyLane:
    """Pulls from a training in this process: liars do what they are told to, others serve truly.

    Attributes:
        damages: What liars do to every transfer, by endpoint.
        spoils_layout: Whether liars damage the layout, too.
        hits: Liars whose damage has come to the puller.
        before_ask: Called before each transfer.
    """

    def __init__(self, world: World, stranger: World, rng: Random) -> None:
        """Serve a training.

        Args:
            world: Whose versions.
            stranger: Another training of the same layout, which liars have, too.
            rng: Decides.
        """
        self.damages: Mapping[str, Damage] = {}
        self.spoils_layout = False
        self.hits: set[str] = set()
        self.before_ask: Callable[[], None] = lambda: None
        self._world = world
        self._stranger = stranger
        self._rng = rng
        self._known: dict[tuple[int, bool, bytes], Sequence[bytes]] = {}
        self._known_version = -1

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield the plan, then its chunks."""
        del transfer_token
        self.before_ask()
        true = await self._wires(self._world, spec)
        damage = self.damages.get(endpoint)
        sent = list(true) if damage is None else await self._damaged(damage, spec, true)
        for at, wire in enumerate(sent):
            if at >= len(true) or wire is not true[at]:
                self.hits.add(endpoint)
            if isinstance(wire, AstraflowError):
                raise wire
            yield _read(wire)
        if len(sent) < len(true):
            self.hits.add(endpoint)

    async def _damaged(self, damage: Damage, spec: TransferSpec, true: Sequence[bytes]) -> Wires:
        if len(true) < 2:
            return list(true)
        other = await self._other(spec) if damage in DAMAGES["wrong_base"] else None
        return damage(Transfer(wires=true, other=other or true, rng=self._rng))

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        """Return the layout."""
        del digest, transfer_token
        wire = encode_layout(self._world.layout).SerializeToString()
        if self.spoils_layout and endpoint != HONEST:
            wire = self._spoiled_layout(wire)
            self.hits.add(endpoint)
        try:
            message = layout_pb2.Layout.FromString(wire)
        except DecodeError:
            message = grpc_lane._parsed(None)  # noqa: SLF001 - as the gRPC lane answers it
        return decode_layout(message)

    async def close(self) -> None:
        """Nothing is open."""

    def _spoiled_layout(self, wire: bytes) -> bytes:
        if self._rng.random() < 0.5:
            return flipped(self._rng, wire)
        message: Any = layout_pb2.Layout.FromString(wire)
        tensor = self._rng.choice(message.tensors)
        if self._rng.random() < 0.3 and tensor.shape:
            tensor.shape[0] = self._rng.choice([-1, 0, 1 << 40, (1 << 63) - 1])
        else:
            set_any(self._rng, self._rng.choice([message, tensor]))
        return message.SerializeToString()

    async def _other(self, spec: TransferSpec) -> Sequence[bytes] | None:
        """Return what would be sent to who asks for something else; None: nothing."""
        message = encode_transfer_spec(spec)
        del message.have_chunks[:], message.want_chunks[:]
        world = self._world
        match self._rng.randrange(5):
            case 0:
                world = self._stranger
            case 1:
                message.ClearField("base_version")
            case 2:
                message.version -= 1
                message.base_version -= self._rng.randrange(1, 3)
            case _:
                message.base_version -= self._rng.randrange(1, 5)
        try:
            return await self._wires(world, decode_transfer_spec(message))
        except AstraflowError:
            return None

    async def _wires(self, world: World, spec: TransferSpec) -> Sequence[bytes]:
        """Return what a source sends; who asks for the same gets the same."""
        message = encode_transfer_spec(replace(spec, goodput_bytes_per_s=0.0))
        key = (world.version, world is self._world, message.SerializeToString())
        if self._known_version != world.version:
            self._known.clear()
            self._known_version = world.version
        if key not in self._known:
            self._known[key] = await _sent(world, key[2])
        return self._known[key]


async def _sent(world: World, asked: bytes) -> Sequence[bytes]:
    spec = decode_transfer_spec(transfer_pb2.TransferSpec.FromString(asked))
    served = world.servicer.open_transfer(spec)
    with closing(served):
        async with aclosing(served.items()) as items:
            sent = [grpc_lane.encode_response(each) async for each in items]
    return [each.SerializeToString() for each in sent]


def _read(wire: bytes) -> TransferPlan | SentChunk:
    """Read a message as the gRPC lane does: bytes that are none arrive as None."""
    try:
        message = PullResponse.FromString(wire)
    except DecodeError:
        message = None
    return grpc_lane.decode_response(message)
