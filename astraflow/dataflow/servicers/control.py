"""ControlService: the run as its operator sees it."""

# ruff: noqa: N802 - methods are named by the contract

from datetime import timedelta

from astraflow.core.events import MemberDrained, RunPaused, RunResumed, RunStopped
from astraflow.core.ids import MemberId
from astraflow.dataflow.hub import Hub
from astraflow.rpc.access import Access
from astraflow.rpc.streams import Context
from astraflow.wire import control, scale
from astraflow.wire.fields import optional_span
from astraflow_proto.control.v1 import control_service_pb2 as control_pb

_INTERVAL = timedelta(seconds=1)


class ControlServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def GetRun(
        self, _request: control_pb.GetRunRequest, context: Context
    ) -> control_pb.GetRunResponse:
        """Return the whole state."""
        self._access.operator(context)
        status = await self._hub.told(self._hub.status())
        return control_pb.GetRunResponse(run=control.encode_run_status(status))

    async def WatchRun(self, request: control_pb.WatchRunRequest, context: Context) -> None:
        """Send the state now and after changes."""
        self._access.operator(context)
        given = optional_span(request, "min_interval")
        interval = _INTERVAL if given is None else given
        async for status in self._hub.watch_status(interval):
            await context.write(control_pb.WatchRunResponse(run=control.encode_run_status(status)))

    async def PauseRun(
        self, _request: control_pb.PauseRunRequest, context: Context
    ) -> control_pb.PauseRunResponse:
        """Stop new tasks."""
        self._access.operator(context)
        await self._hub.take(RunPaused())
        return control_pb.PauseRunResponse()

    async def ResumeRun(
        self, _request: control_pb.ResumeRunRequest, context: Context
    ) -> control_pb.ResumeRunResponse:
        """Undo PauseRun."""
        self._access.operator(context)
        await self._hub.take(RunResumed())
        return control_pb.ResumeRunResponse()

    async def DrainMember(
        self, request: control_pb.DrainMemberRequest, context: Context
    ) -> control_pb.DrainMemberResponse:
        """Let one member finish and leave."""
        self._access.operator(context)
        member_id, grace = MemberId(request.member_id), optional_span(request, "grace")
        await self._hub.take(MemberDrained(member_id=member_id, grace=grace))
        return control_pb.DrainMemberResponse()

    async def SaveRun(
        self, request: control_pb.SaveRunRequest, context: Context
    ) -> control_pb.SaveRunResponse:
        """Have every trainer save under one id."""
        self._access.operator(context)
        left_s = context.time_remaining()
        # The answer has to be on its way before the caller stops to wait for it.
        within_s = None if left_s is None else 0.9 * left_s
        saved, path = await self._hub.save(request.checkpoint_id, within_s=within_s)
        return control.encode_saved_run(saved, path=str(path))

    async def GetScaleAdvice(
        self, request: control_pb.GetScaleAdviceRequest, context: Context
    ) -> control_pb.GetScaleAdviceResponse:
        """Return how large the pool should be."""
        self._access.operator(context)
        advice = await self._hub.told(self._hub.scale_advice(optional_span(request, "window")))
        return control_pb.GetScaleAdviceResponse(advice=scale.encode_advice(advice))

    async def StopRun(
        self, request: control_pb.StopRunRequest, context: Context
    ) -> control_pb.StopRunResponse:
        """End the run and every session."""
        self._access.operator(context)
        mode, grace = control.decode_stop_mode(request.mode), optional_span(request, "grace")
        await self._hub.take(RunStopped(mode=mode, grace=grace))
        return control_pb.StopRunResponse()
