"""LedgerService: the books of the run."""

# ruff: noqa: N802 - methods are named by the contract

from astraflow.core.events import PromptRequeued
from astraflow.core.ids import PolicyId, PromptId
from astraflow.core.status import DeadLetter, RolloutRecord
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.pages import page_of
from astraflow.dataflow.selection import Selection
from astraflow.rpc.access import Access
from astraflow.rpc.streams import Context
from astraflow.wire import ledger
from astraflow.wire.fields import encode_time, optional
from astraflow.wire.rollout import OUTCOMES
from astraflow.wire.waits import encode_wait_reason
from astraflow_proto.control.v1 import ledger_service_pb2 as ledger_pb


class LedgerServicer:
    """Convert, one call, convert."""

    def __init__(self, hub: Hub, access: Access) -> None:
        self._hub = hub
        self._access = access

    async def GetLedger(
        self, _request: ledger_pb.GetLedgerRequest, context: Context
    ) -> ledger_pb.GetLedgerResponse:
        """Return the books at one instant."""
        self._access.operator(context)
        books = ledger_pb.GetLedgerResponse(
            accounts=map(ledger.encode_ledger_account, self._hub.run.accounts()),
            server_time=encode_time(self._hub.now()),
        )
        return await self._hub.told(books)

    async def ListRollouts(
        self, request: ledger_pb.ListRolloutsRequest, context: Context
    ) -> ledger_pb.ListRolloutsResponse:
        """Return one page of the rollouts that are kept, newest first."""
        self._access.operator(context)
        selection = _selection(request)
        page, next_token = page_of(
            [record for record in self._hub.run.rollouts() if record in selection],
            key=_rollout_key,
            size=request.page_size,
            token=request.page_token,
            selection=repr(selection).encode(),
        )
        is_full = request.view == ledger_pb.ROLLOUT_VIEW_FULL
        listed = ledger_pb.ListRolloutsResponse(
            rollouts=[ledger.encode_rollout_record(r, with_trajectories=is_full) for r in page],
            next_page_token=next_token,
        )
        return await self._hub.told(listed)

    async def ListDeadLetters(
        self, request: ledger_pb.ListDeadLettersRequest, context: Context
    ) -> ledger_pb.ListDeadLettersResponse:
        """Return one page of the prompts given up, newest first."""
        self._access.operator(context)
        page, next_token = page_of(
            self._hub.run.dead_letters(),
            key=_prompt_key,
            size=request.page_size,
            token=request.page_token,
            selection=b"dead letters",
        )
        letters = map(ledger.encode_dead_letter, await self._hub.told(page))
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
        self._access.operator(context)
        reasons = self._hub.run.explain(PolicyId(request.policy_id), self._hub.now())
        told = await self._hub.told(reasons)
        return ledger_pb.ExplainWaitResponse(reasons=map(encode_wait_reason, told))


def _rollout_key(record: RolloutRecord) -> str:
    return record.rollout.rollout_id


def _prompt_key(letter: DeadLetter) -> str:
    return f"{letter.prompt.prompt_id}@{letter.prompt.epoch}"


def _selection(request: ledger_pb.ListRolloutsRequest) -> Selection:
    return Selection(
        policy_id=request.policy_id,
        prompt_id=request.prompt_id,
        group_id=request.group_id,
        batch_id=request.batch_id,
        rollout_id=request.rollout_id,
        member_id=request.member_id,
        places=tuple(map(ledger.PLACES.decode, request.places)),
        outcomes=tuple(map(OUTCOMES.decode, request.outcomes)),
        min_reward=optional(request, "min_reward"),
        max_reward=optional(request, "max_reward"),
    )
