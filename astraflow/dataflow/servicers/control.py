"""ControlService: the run as its operator sees it."""

# ruff: noqa: N802 - methods are named by the contract

from datetime import timedelta

from astraflow.core.events import MemberDrained, RunPaused, RunResumed, RunStopped
from astraflow.core.ids import MemberId
from astraflow.dataflow.hub import Hub
from astraflow.rpc.access import Access
from astraflow.rpc.streams import Context
from astraflow.wire import control as wire
from astraflow.wire import scale
from astraflow.wire.fields import optional_span
from astraflow_proto.control.v1 import control_service_pb2 as pb

_INTERVAL = timedelta(seconds=1)


class ControlServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def GetRun(self, _request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        """Return the whole state."""
        self._access.operator(context)
        status = await self._hub.told(self._hub.status())
        return pb.GetRunResponse(run=wire.encode_run_status(status))

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> None:
        """Send the state now and after changes."""
        self._access.operator(context)
        given = optional_span(request, "min_interval")
        interval = _INTERVAL if given is None else given
        async for status in self._hub.watch_status(interval):
            await context.write(pb.WatchRunResponse(run=wire.encode_run_status(status)))

    async def PauseRun(self, _request: pb.PauseRunRequest, context: Context) -> pb.PauseRunResponse:
        """Stop new tasks."""
        self._access.operator(context)
        await self._hub.take(RunPaused())
        return pb.PauseRunResponse()

    async def ResumeRun(
        self, _request: pb.ResumeRunRequest, context: Context
    ) -> pb.ResumeRunResponse:
        """Undo PauseRun."""
        self._access.operator(context)
        await self._hub.take(RunResumed())
        return pb.ResumeRunResponse()

    async def DrainMember(
        self, request: pb.DrainMemberRequest, context: Context
    ) -> pb.DrainMemberResponse:
        """Let one member finish and leave."""
        self._access.operator(context)
        member_id, grace = MemberId(request.member_id), optional_span(request, "grace")
        await self._hub.take(MemberDrained(member_id=member_id, grace=grace))
        return pb.DrainMemberResponse()

    async def SaveRun(self, request: pb.SaveRunRequest, context: Context) -> pb.SaveRunResponse:
        """Have every trainer save under one id."""
        self._access.operator(context)
        left_s = context.time_remaining()
        # The answer has to be on its way before the caller stops to wait for it.
        within_s = None if left_s is None else 0.9 * left_s
        saved, path = await self._hub.save(request.checkpoint_id, within_s=within_s)
        return wire.encode_saved_run(saved, path=str(path))

    async def GetScaleAdvice(
        self, request: pb.GetScaleAdviceRequest, context: Context
    ) -> pb.GetScaleAdviceResponse:
        """Return how large the pool should be."""
        self._access.operator(context)
        advice = await self._hub.told(self._hub.scale_advice(optional_span(request, "window")))
        return pb.GetScaleAdviceResponse(advice=scale.encode_advice(advice))

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.StopRunResponse:
        """End the run and every session."""
        self._access.operator(context)
        mode, grace = wire.decode_stop_mode(request.mode), optional_span(request, "grace")
        await self._hub.take(RunStopped(mode=mode, grace=grace))
        return pb.StopRunResponse()
