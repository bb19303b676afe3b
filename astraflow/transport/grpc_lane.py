"""The gRPC lane: always there. One round trip to the first byte, connections stay warm."""

from collections.abc import AsyncGenerator
from typing import Any, cast

import grpc.aio

from astraflow.core.layout import Layout
from astraflow.rpc.auth import transfer_metadata
from astraflow.rpc.channel import dial
from astraflow.rpc.errors import raised_from
from astraflow.rpc.tls import Tls
from astraflow.wire.patches import (
    SentChunk,
    TransferPlan,
    TransferSpec,
    decode_sent_chunk,
    decode_transfer_plan,
    encode_transfer_spec,
)
from astraflow.wire.weights import decode_layout
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import TransferServiceStub


class GrpcLane:
    """Pulls from any number of sources, each over a channel that is kept."""

    def __init__(self, *, tls: Tls | None = None) -> None:
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[TransferPlan | SentChunk]:
        """Yield the plan, then its chunks, as they arrive.

        Args:
            endpoint: host:port of a TransferService.
            spec: What is wanted.
            transfer_token: Of the run.

        Raises:
            AstraflowError: What the source answered, or SOURCE_UNREACHABLE.
        """
        request = pb.PullRequest(spec=encode_transfer_spec(spec))
        call = self._stub(endpoint).Pull(request, metadata=transfer_metadata(transfer_token))
        try:
            async for response in call:
                if response.WhichOneof("item") == "plan":
                    yield decode_transfer_plan(response.plan)
                else:
                    yield decode_sent_chunk(response.chunk)
        except grpc.aio.AioRpcError as error:
            raise raised_from(error) from error
        finally:
            call.cancel()

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        """Return a layout; the caller proves it by its digest.

        Raises:
            AstraflowError: LAYOUT_UNKNOWN, or what else the source answered.
        """
        try:
            response = await self._stub(endpoint).GetLayout(
                pb.GetLayoutRequest(layout_digest=digest),
                metadata=transfer_metadata(transfer_token),
                timeout=30,
            )
        except grpc.aio.AioRpcError as error:
            raise raised_from(error) from error
        return decode_layout(response.layout)

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    def _stub(self, endpoint: str) -> Any:
        if endpoint not in self._channels:
            self._channels[endpoint] = dial(endpoint, tls=self._tls)
        return cast("Any", TransferServiceStub(self._channels[endpoint]))
