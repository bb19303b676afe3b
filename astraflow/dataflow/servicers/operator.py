"""ControlService, EvalService and LedgerService: the run as its operator sees it."""

# ruff: noqa: N802 - methods are named by the contract

from collections.abc import Callable, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import TypeVar, cast

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import (
    EvalCancelled,
    MemberDrained,
    PromptRequeued,
    RunPaused,
    RunResumed,
    RunStopped,
)
from astraflow.core.ids import EvalRunId, MemberId, PolicyId, PromptId
from astraflow.dataflow.hub import Hub
from astraflow.rpc.access import Access, TokenRole, required_token_id
from astraflow.rpc.auth import Context
from astraflow.wire import control
from astraflow.wire.common import encode_wait_reason
from astraflow.wire.fields import encode_time, optional_span
from astraflow_proto.control.v1 import control_service_pb2 as control_pb
from astraflow_proto.control.v1 import ledger_service_pb2 as ledger_pb
from astraflow_proto.evals.v1 import eval_service_pb2 as eval_pb

Item = TypeVar("Item")

_DEFAULT = 50

_LARGEST = 1000


def page_of(
    items: Sequence[Item],
    *,
    key: Callable[[Item], str],
    size: int,
    token: str,
    selection: bytes,
) -> tuple[Sequence[Item], str]:
    """Return one page and the token of the next one; an empty token ends the list.

    Args:
        items: Newest first.
        key: Unique per item.
        size: Items wanted; 0: 50, more than 1,000: 1,000.
        token: Of the page before; empty: from the start.
        selection: How the items were selected; the same for all pages of a list.

    Raises:
        AstraflowError: INVALID_FIELD for a token of another selection.
    """
    digest = blake2b(selection, digest_size=8).hexdigest()
    start = 0
    if token:
        given, _, last = token.partition(":")
        if given != digest:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                "page_token is of a list with other filters; start again without it",
                metadata={"field": "page_token"},
            )
        # What is no longer in the list was at its old end, and so was all that follows.
        places = {key(item): place for place, item in enumerate(items)}
        start = places.get(last, len(items) - 1) + 1
    end = start + min(max(size, 0) or _DEFAULT, _LARGEST)
    page = items[start:end]
    return page, f"{digest}:{key(page[-1])}" if page and end < len(items) else ""


_INTERVAL = timedelta(seconds=1)


class OperatorServicer:
    """ControlService, EvalService and LedgerService of one hub."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def GetRun(
        self, _request: control_pb.GetRunRequest, context: Context
    ) -> control_pb.GetRunResponse:
        self._access.reader(context)
        status = await self._hub.when_safe(self._hub.status())
        return control_pb.GetRunResponse(run=control.encode_run_status(status))

    async def WatchRun(self, request: control_pb.WatchRunRequest, context: Context) -> None:
        """Send the state now and after changes."""
        self._access.reader(context)
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

    async def RevokeToken(
        self, request: control_pb.RevokeTokenRequest, context: Context
    ) -> control_pb.RevokeTokenResponse:
        """Take a token of a role back."""
        self._access.operator(context)
        member_ids = await self._hub.revoke(required_token_id(request.token_id))
        return control_pb.RevokeTokenResponse(member_ids=member_ids)

    async def SaveRun(
        self, request: control_pb.SaveRunRequest, context: Context
    ) -> control_pb.SaveRunResponse:
        """Have every trainer save under one id."""
        self._access.operator(context)
        # Its stubs know calls with a deadline only.
        left_s = cast("float | None", context.time_remaining())
        # The answer has to be on its way before the caller stops to wait for it.
        within_s = None if left_s is None else 0.9 * left_s
        saved, path = await self._hub.save(request.checkpoint_id, within_s=within_s)
        return control.encode_saved_run(saved, path=str(path))

    async def GetScaleAdvice(
        self, request: control_pb.GetScaleAdviceRequest, context: Context
    ) -> control_pb.GetScaleAdviceResponse:
        """Return how large the pool should be."""
        self._access.reader(context)
        advice = await self._hub.when_safe(self._hub.scale_advice(optional_span(request, "window")))
        return control_pb.GetScaleAdviceResponse(advice=control.encode_advice(advice))

    async def StopRun(
        self, request: control_pb.StopRunRequest, context: Context
    ) -> control_pb.StopRunResponse:
        """End the run and every session."""
        self._access.operator(context)
        mode, grace = control.STOP_MODES.decode(request.mode), optional_span(request, "grace")
        await self._hub.take(RunStopped(mode=mode, grace=grace))
        return control_pb.StopRunResponse()

    async def CreateEvalRun(
        self, request: eval_pb.CreateEvalRunRequest, context: Context
    ) -> eval_pb.CreateEvalRunResponse:
        """Start an evaluation."""
        self._access.anyone(context, TokenRole.OPERATOR)
        run = await self._hub.take(control.decode_eval_created(request))
        return eval_pb.CreateEvalRunResponse(eval_run=control.encode_eval_run(run))

    async def GetEvalRun(
        self, request: eval_pb.GetEvalRunRequest, context: Context
    ) -> eval_pb.GetEvalRunResponse:
        """Return its state."""
        self._access.anyone(context)
        run = self._hub.run.eval_run(EvalRunId(request.eval_run_id))
        return eval_pb.GetEvalRunResponse(
            eval_run=control.encode_eval_run(await self._hub.when_safe(run))
        )

    async def WatchEvalRun(self, request: eval_pb.WatchEvalRunRequest, context: Context) -> None:
        """Send the state now and at each change."""
        self._access.anyone(context)
        async for run in self._hub.watch_eval(EvalRunId(request.eval_run_id)):
            await context.write(eval_pb.WatchEvalRunResponse(eval_run=control.encode_eval_run(run)))

    async def CancelEvalRun(
        self, request: eval_pb.CancelEvalRunRequest, context: Context
    ) -> eval_pb.CancelEvalRunResponse:
        """Stop it."""
        self._access.anyone(context, TokenRole.OPERATOR)
        run = await self._hub.take(EvalCancelled(eval_run_id=EvalRunId(request.eval_run_id)))
        return eval_pb.CancelEvalRunResponse(eval_run=control.encode_eval_run(run))

    async def ListEvalSuites(
        self, _request: eval_pb.ListEvalSuitesRequest, context: Context
    ) -> eval_pb.ListEvalSuitesResponse:
        """Return the suites of the recipe."""
        self._access.anyone(context)
        suites = self._hub.run.suites()
        return eval_pb.ListEvalSuitesResponse(suites=map(control.encode_eval_suite, suites))

    async def GetLedger(
        self, _request: ledger_pb.GetLedgerRequest, context: Context
    ) -> ledger_pb.GetLedgerResponse:
        """Return the books at one instant."""
        self._access.reader(context)
        books = ledger_pb.GetLedgerResponse(
            accounts=map(control.encode_ledger_account, self._hub.run.accounts()),
            server_time=encode_time(self._hub.now()),
        )
        return await self._hub.when_safe(books)

    async def ListRollouts(
        self, request: ledger_pb.ListRolloutsRequest, context: Context
    ) -> ledger_pb.ListRolloutsResponse:
        """Return one page of the rollouts that are kept, newest first."""
        self._access.reader(context)
        query = control.decode_rollout_query(request)
        page, next_token = page_of(
            [record for record in self._hub.run.rollouts() if record in query],
            key=lambda record: record.rollout.rollout_id,
            size=request.page_size,
            token=request.page_token,
            selection=repr(query).encode(),
        )
        is_full = request.view == ledger_pb.ROLLOUT_VIEW_FULL
        records = [control.encode_rollout_record(record) for record in page]
        for record in () if is_full else records:
            record.rollout.ClearField("trajectories")
        listed = ledger_pb.ListRolloutsResponse(rollouts=records, next_page_token=next_token)
        return await self._hub.when_safe(listed)

    async def ListDeadLetters(
        self, request: ledger_pb.ListDeadLettersRequest, context: Context
    ) -> ledger_pb.ListDeadLettersResponse:
        """Return one page of the prompts given up, newest first."""
        self._access.reader(context)
        page, next_token = page_of(
            self._hub.run.dead_letters(),
            key=lambda letter: f"{letter.prompt.prompt_id}@{letter.prompt.epoch}",
            size=request.page_size,
            token=request.page_token,
            selection=b"dead letters",
        )
        letters = map(control.encode_dead_letter, await self._hub.when_safe(page))
        return ledger_pb.ListDeadLettersResponse(dead_letters=letters, next_page_token=next_token)

    async def RequeuePrompt(
        self, request: ledger_pb.RequeuePromptRequest, context: Context
    ) -> ledger_pb.RequeuePromptResponse:
        """Issue a dead letter again."""
        self._access.operator(context)
        await self._hub.take(PromptRequeued(prompt_id=PromptId(request.prompt_id)))
        return ledger_pb.RequeuePromptResponse()

    async def ExplainWait(
        self, request: ledger_pb.ExplainWaitRequest, context: Context
    ) -> ledger_pb.ExplainWaitResponse:
        """Return what a policy's trainer waits for."""
        self._access.reader(context)
        reasons = self._hub.run.explain(PolicyId(request.policy_id), self._hub.now())
        told = await self._hub.when_safe(reasons)
        return ledger_pb.ExplainWaitResponse(reasons=map(encode_wait_reason, told))
