"""EvalService: measures versions on a share of the pool."""

# ruff: noqa: N802 - methods are named by the contract

from astraflow.core.events import EvalCancelled, EvalCreated
from astraflow.core.ids import EvalRunId, PolicyId
from astraflow.dataflow.hub import Hub
from astraflow.rpc.access import Access
from astraflow.rpc.streams import Context
from astraflow.wire import evals
from astraflow.wire.fields import optional, required
from astraflow_proto.evals.v1 import eval_service_pb2 as eval_pb


class EvalServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def CreateEvalRun(
        self, request: eval_pb.CreateEvalRunRequest, context: Context
    ) -> eval_pb.CreateEvalRunResponse:
        """Start an evaluation."""
        self._access.anyone(context)
        event = EvalCreated(
            request_id=required(request.request_id, "request_id"),
            suite=request.suite,
            versions={PolicyId(name): number for name, number in request.versions.items()},
            pool_share=optional(request, "pool_share"),
        )
        run = await self._hub.take(event)
        return eval_pb.CreateEvalRunResponse(eval_run=evals.encode_eval_run(run))

    async def GetEvalRun(
        self, request: eval_pb.GetEvalRunRequest, context: Context
    ) -> eval_pb.GetEvalRunResponse:
        """Return its state."""
        self._access.anyone(context)
        run = self._hub.run.eval_run(EvalRunId(request.eval_run_id))
        return eval_pb.GetEvalRunResponse(eval_run=evals.encode_eval_run(await self._hub.told(run)))

    async def WatchEvalRun(self, request: eval_pb.WatchEvalRunRequest, context: Context) -> None:
        """Send the state now and at each change."""
        self._access.anyone(context)
        async for run in self._hub.watch_eval(EvalRunId(request.eval_run_id)):
            await context.write(eval_pb.WatchEvalRunResponse(eval_run=evals.encode_eval_run(run)))

    async def CancelEvalRun(
        self, request: eval_pb.CancelEvalRunRequest, context: Context
    ) -> eval_pb.CancelEvalRunResponse:
        """Stop it."""
        self._access.anyone(context)
        run = await self._hub.take(EvalCancelled(eval_run_id=EvalRunId(request.eval_run_id)))
        return eval_pb.CancelEvalRunResponse(eval_run=evals.encode_eval_run(run))

    async def ListEvalSuites(
        self, _request: eval_pb.ListEvalSuitesRequest, context: Context
    ) -> eval_pb.ListEvalSuitesResponse:
        """Return the suites of the recipe."""
        self._access.anyone(context)
        suites = self._hub.run.suites()
        return eval_pb.ListEvalSuitesResponse(suites=map(evals.encode_eval_suite, suites))
