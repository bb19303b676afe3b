"""SessionService: keeps members alive, whatever their role."""

# ruff: noqa: N802 - methods are named by the contract

from astraflow.core.effects import Renewal
from astraflow.core.events import FailureReported, MemberKeptAlive, SessionLeft
from astraflow.core.members import RaasLoad, TrainerLoad
from astraflow.dataflow.hub import Hub
from astraflow.rpc.access import Access
from astraflow.rpc.streams import Context
from astraflow.wire import common as wire
from astraflow.wire.fields import encode_span, encode_time
from astraflow_proto.dataflow.v1 import session_service_pb2 as pb


class SessionServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def KeepAlive(
        self, request: pb.KeepAliveRequest, context: Context
    ) -> pb.KeepAliveResponse:
        """Renew the caller's session."""
        member_id = self._access.member(context)
        kept: Renewal = await self._hub.take(
            MemberKeptAlive(member_id=member_id, load=_load(request))
        )
        return pb.KeepAliveResponse(
            ttl=encode_span(kept.ttl),
            directive=wire.encode_directive(kept.directive),
            server_time=encode_time(kept.server_time),
        )

    async def ReportFailure(
        self, request: pb.ReportFailureRequest, context: Context
    ) -> pb.ReportFailureResponse:
        """Take what failed beside any rollout."""
        member_id = self._access.member(context)
        failure = wire.decode_failure(request.failure)
        await self._hub.take(FailureReported(member_id=member_id, failure=failure))
        return pb.ReportFailureResponse()

    async def EndSession(
        self, request: pb.EndSessionRequest, context: Context
    ) -> pb.EndSessionResponse:
        """Return at once what the caller holds."""
        member_id = self._access.member(context, may_be_ended=True)
        await self._hub.take(SessionLeft(member_id=member_id, message=request.message))
        return pb.EndSessionResponse()


def _load(request: pb.KeepAliveRequest) -> RaasLoad | TrainerLoad | None:
    match request.WhichOneof("load"):
        case "raas":
            return wire.decode_raas_load(request.raas)
        case "trainer":
            return wire.decode_trainer_load(request.trainer)
        case _:
            return None
