"""SessionService: keeps members alive, whatever their role."""

# ruff: noqa: N802 - methods are named by the contract

from astraflow.core.effects import Renewal
from astraflow.core.events import FailureReported, MemberKeptAlive, SessionLeft
from astraflow.core.members import RaasLoad, TrainerLoad
from astraflow.dataflow.hub import Hub
from astraflow.rpc.access import Access
from astraflow.rpc.streams import Context
from astraflow.wire import common
from astraflow.wire.fields import encode_span, encode_time
from astraflow_proto.dataflow.v1 import session_service_pb2 as session_pb


class SessionServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def KeepAlive(
        self, request: session_pb.KeepAliveRequest, context: Context
    ) -> session_pb.KeepAliveResponse:
        """Renew the caller's session."""
        member_id = self._access.member(context)
        kept: Renewal = await self._hub.take(
            MemberKeptAlive(member_id=member_id, load=_load(request))
        )
        return session_pb.KeepAliveResponse(
            ttl=encode_span(kept.ttl),
            directive=common.encode_directive(kept.directive),
            server_time=encode_time(kept.server_time),
        )

    async def ReportFailure(
        self, request: session_pb.ReportFailureRequest, context: Context
    ) -> session_pb.ReportFailureResponse:
        """Take what failed beside any rollout."""
        member_id = self._access.member(context)
        failure = common.decode_failure(request.failure)
        await self._hub.take(FailureReported(member_id=member_id, failure=failure))
        return session_pb.ReportFailureResponse()

    async def EndSession(
        self, request: session_pb.EndSessionRequest, context: Context
    ) -> session_pb.EndSessionResponse:
        """Return at once what the caller holds."""
        member_id = self._access.member(context, may_be_ended=True)
        await self._hub.take(SessionLeft(member_id=member_id, message=request.message))
        return session_pb.EndSessionResponse()


def _load(request: session_pb.KeepAliveRequest) -> RaasLoad | TrainerLoad | None:
    match request.WhichOneof("load"):
        case "raas":
            return common.decode_raas_load(request.raas)
        case "trainer":
            return common.decode_trainer_load(request.trainer)
        case _:
            return None
