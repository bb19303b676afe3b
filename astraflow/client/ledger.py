"""The books of the run: what came of every sample, and why."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from astraflow.client.hub import Hub
from astraflow.core.ids import BatchId, GroupId, MemberId, PolicyId, PromptId, RolloutId
from astraflow.core.rollouts import Outcome
from astraflow.core.status import DeadLetter, LedgerAccount, RolloutPlace, RolloutRecord, WaitReason
from astraflow.rpc.auth import MetadataPairs
from astraflow.wire.ledger import (
    PLACES,
    decode_dead_letter,
    decode_ledger_account,
    decode_rollout_record,
)
from astraflow.wire.rollout import OUTCOMES
from astraflow.wire.waits import decode_wait_reason
from astraflow_proto.control.v1 import ledger_service_pb2
from astraflow_proto.control.v1.ledger_service_pb2_grpc import LedgerServiceStub

_PAGE_SIZE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Selects rollouts; None and empty select all.

    Attributes:
        policy_id: That has a trajectory in it.
        prompt_id: That it answers.
        group_id: That it belongs to.
        batch_id: That it was put into.
        rollout_id: This one.
        member_id: That made it.
        places: Any of these.
        outcomes: Any of these.
        min_reward: At least.
        max_reward: At most.
    """

    policy_id: PolicyId | None = None
    prompt_id: PromptId | None = None
    group_id: GroupId | None = None
    batch_id: BatchId | None = None
    rollout_id: RolloutId | None = None
    member_id: MemberId | None = None
    places: tuple[RolloutPlace, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    min_reward: float | None = None
    max_reward: float | None = None

    def to_request(self) -> ledger_service_pb2.ListRolloutsRequest:
        """Return the request for the first page."""
        return ledger_service_pb2.ListRolloutsRequest(
            policy_id=self.policy_id or "",
            prompt_id=self.prompt_id or "",
            group_id=self.group_id or "",
            batch_id=self.batch_id or "",
            rollout_id=self.rollout_id or "",
            member_id=self.member_id or "",
            places=map(PLACES.encode, self.places),
            outcomes=map(OUTCOMES.encode, self.outcomes),
            min_reward=self.min_reward,
            max_reward=self.max_reward,
            view=ledger_service_pb2.ROLLOUT_VIEW_FULL,
        )


class LedgerClient:
    """LedgerService for an operator."""

    def __init__(self, hub: Hub, *, metadata: MetadataPairs) -> None:
        self._hub = hub
        self._metadata = metadata
        self._stub = LedgerServiceStub(hub.channel)

    async def accounts(self) -> tuple[LedgerAccount, ...]:
        """Return the books at one instant, one account per policy."""
        answer = await self._hub.call(
            self._stub.GetLedger, ledger_service_pb2.GetLedgerRequest(), metadata=self._metadata
        )
        return tuple(map(decode_ledger_account, answer.accounts))

    async def rollouts(
        self, where: RolloutFilter | None = None, *, limit: int = 50
    ) -> AsyncIterator[RolloutRecord]:
        """Yield stored rollouts, newest first, at most `limit`."""
        request = (where or RolloutFilter()).to_request()
        while limit > 0:
            request.page_size = min(limit, _PAGE_SIZE)
            page = await self._hub.call(self._stub.ListRollouts, request, metadata=self._metadata)
            for record in page.rollouts[:limit]:
                yield decode_rollout_record(record)
            limit -= len(page.rollouts)
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return

    async def dead_letters(self, *, limit: int = 50) -> AsyncIterator[DeadLetter]:
        """Yield the prompts given up, newest first, at most `limit`."""
        request = ledger_service_pb2.ListDeadLettersRequest()
        while limit > 0:
            request.page_size = min(limit, _PAGE_SIZE)
            page = await self._hub.call(
                self._stub.ListDeadLetters, request, metadata=self._metadata
            )
            for letter in page.dead_letters[:limit]:
                yield decode_dead_letter(letter)
            limit -= len(page.dead_letters)
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return

    async def requeue(self, prompt_id: PromptId) -> None:
        """Issue a dead letter again.

        Raises:
            AstraflowError: PROMPT_UNKNOWN.
        """
        request = ledger_service_pb2.RequeuePromptRequest(prompt_id=prompt_id)
        await self._hub.call(self._stub.RequeuePrompt, request, metadata=self._metadata)

    async def explain_wait(self, policy_id: PolicyId) -> tuple[WaitReason, ...]:
        """Return what a policy's trainer waits for now, link by link; empty: nothing.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        request = ledger_service_pb2.ExplainWaitRequest(policy_id=policy_id)
        answer = await self._hub.call(self._stub.ExplainWait, request, metadata=self._metadata)
        return tuple(map(decode_wait_reason, answer.reasons))
