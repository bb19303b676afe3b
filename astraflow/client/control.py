"""The run as its operator sees it: state, accounting, evaluations, and the means to steer it."""

import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from astraflow.client.hub import HubChannel
from astraflow.core.autoscale import ScaleAdvice
from astraflow.core.evals import EvalRun, EvalSuiteInfo
from astraflow.core.ids import BatchId, EvalRunId, GroupId, MemberId, PolicyId, PromptId, RolloutId
from astraflow.core.rollouts import Outcome
from astraflow.core.status import (
    DeadLetter,
    LedgerAccount,
    RolloutPlace,
    RolloutRecord,
    RunStatus,
    SavedRun,
    StopMode,
    WaitReason,
)
from astraflow.core.versions import VersionInfo
from astraflow.rpc.auth import MetadataPairs, bearer
from astraflow.rpc.tls import Tls
from astraflow.wire.common import decode_wait_reason
from astraflow.wire.control import (
    PLACES,
    STOP_MODES,
    decode_advice,
    decode_dead_letter,
    decode_ledger_account,
    decode_rollout_record,
    decode_run_status,
    decode_saved_run,
)
from astraflow.wire.evals import decode_eval_run, decode_eval_suite
from astraflow.wire.rollout import OUTCOMES
from astraflow.wire.versions import decode_version_info
from astraflow_proto.control.v1 import control_service_pb2, ledger_service_pb2
from astraflow_proto.control.v1.control_service_pb2_grpc import ControlServiceStub
from astraflow_proto.control.v1.ledger_service_pb2_grpc import LedgerServiceStub
from astraflow_proto.evals.v1 import eval_service_pb2
from astraflow_proto.evals.v1.eval_service_pb2_grpc import EvalServiceStub
from astraflow_proto.weights.v1 import version_service_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub

_PAGE_SIZE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
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

    def __init__(self, hub: HubChannel, *, metadata: MetadataPairs) -> None:
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
        self, where: RolloutQuery | None = None, *, limit: int = 50
    ) -> AsyncIterator[RolloutRecord]:
        """Yield stored rollouts, newest first, at most `limit`."""
        request = (where or RolloutQuery()).to_request()
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


class EvalClient:
    """EvalService for an operator."""

    def __init__(self, hub: HubChannel, *, metadata: MetadataPairs) -> None:
        self._hub = hub
        self._metadata = metadata
        self._stub = EvalServiceStub(hub.channel)

    async def create(
        self,
        suite: str,
        *,
        versions: Mapping[PolicyId, int] | None = None,
        pool_share: float | None = None,
        request_id: str | None = None,
    ) -> EvalRun:
        """Ask for an evaluation beside training.

        Args:
            suite: Of the recipe.
            versions: To measure; a policy left out: its newest.
            pool_share: Of the pool's capacity, at most; None: the recipe's.
            request_id: The same one asks for the same evaluation again; None: a new one.

        Raises:
            AstraflowError: EVAL_UNKNOWN, VERSION_UNKNOWN, VERSION_EVICTED, VERSION_NOT_SERVED,
                REQUEST_CONFLICT.
        """
        request = eval_service_pb2.CreateEvalRunRequest(
            request_id=request_id or uuid.uuid4().hex,
            suite=suite,
            versions={str(policy): version for policy, version in (versions or {}).items()},
            pool_share=pool_share,
        )
        answer = await self._hub.call(self._stub.CreateEvalRun, request, metadata=self._metadata)
        return decode_eval_run(answer.eval_run)

    async def get(self, eval_run_id: EvalRunId) -> EvalRun:
        """Return where an evaluation stands.

        Raises:
            AstraflowError: EVAL_UNKNOWN.
        """
        request = eval_service_pb2.GetEvalRunRequest(eval_run_id=eval_run_id)
        answer = await self._hub.call(self._stub.GetEvalRun, request, metadata=self._metadata)
        return decode_eval_run(answer.eval_run)

    async def watch(self, eval_run_id: EvalRunId) -> AsyncIterator[EvalRun]:
        """Yield where it stands now and after each change, over cuts, until it is final.

        Raises:
            AstraflowError: EVAL_UNKNOWN.
        """
        request = eval_service_pb2.WatchEvalRunRequest(eval_run_id=eval_run_id)
        answers = self._hub.watch(self._stub.WatchEvalRun, request, metadata=self._metadata)
        async for answer in answers:
            yield decode_eval_run(answer.eval_run)

    async def cancel(self, eval_run_id: EvalRunId) -> EvalRun:
        """Stop it; a final one stays as it is.

        Raises:
            AstraflowError: EVAL_UNKNOWN.
        """
        request = eval_service_pb2.CancelEvalRunRequest(eval_run_id=eval_run_id)
        answer = await self._hub.call(self._stub.CancelEvalRun, request, metadata=self._metadata)
        return decode_eval_run(answer.eval_run)

    async def suites(self) -> tuple[EvalSuiteInfo, ...]:
        """Return the suites of the recipe, by name."""
        answer = await self._hub.call(
            self._stub.ListEvalSuites,
            eval_service_pb2.ListEvalSuitesRequest(),
            metadata=self._metadata,
        )
        return tuple(map(decode_eval_suite, answer.suites))


class ControlClient:
    """An operator's place at a run.

    Attributes:
        ledger: The books.
        evals: Evaluations.
    """

    def __init__(
        self, hub: str, *, token: str, tls: Tls | None = None, patience_s: float = 5.0
    ) -> None:
        """Prepare; the first call dials.

        Args:
            hub: host:port.
            token: The run's operator token.
            tls: None: plain text.
            patience_s: How long the hub is tried again while it cannot be reached.
        """
        self._hub = HubChannel(hub, tls=tls, patience_s=patience_s)
        self._metadata = bearer(token)
        self._stub = ControlServiceStub(self._hub.channel)
        self._versions = VersionServiceStub(self._hub.channel)
        self.ledger = LedgerClient(self._hub, metadata=self._metadata)
        self.evals = EvalClient(self._hub, metadata=self._metadata)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._hub.__aexit__(*raised)

    async def get_run(self) -> RunStatus:
        """Return the whole state.

        Raises:
            AstraflowError: TOKEN_INVALID, ROLE_NOT_ALLOWED; NOT_READY when the hub could not be
                reached. All calls raise these.
        """
        answer = await self._hub.call(
            self._stub.GetRun, control_service_pb2.GetRunRequest(), metadata=self._metadata
        )
        return decode_run_status(answer.run)

    async def watch_run(self, *, min_interval_s: float = 1.0) -> AsyncIterator[RunStatus]:
        """Yield the state now and after changes, over cuts, until it is final."""
        request = control_service_pb2.WatchRunRequest()
        request.min_interval.FromTimedelta(timedelta(seconds=min_interval_s))
        answers = self._hub.watch(self._stub.WatchRun, request, metadata=self._metadata)
        async for answer in answers:
            yield decode_run_status(answer.run)

    async def versions(self, policy_id: PolicyId) -> tuple[VersionInfo, ...]:
        """Return what can be pulled of a policy, oldest first.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        request = version_service_pb2.ListVersionsRequest(policy_id=policy_id)
        answer = await self._hub.call(self._versions.ListVersions, request, metadata=self._metadata)
        return tuple(map(decode_version_info, answer.versions))

    async def pause_run(self) -> None:
        """Stop new tasks; what is out finishes."""
        await self._hub.call(
            self._stub.PauseRun, control_service_pb2.PauseRunRequest(), metadata=self._metadata
        )

    async def resume_run(self) -> None:
        await self._hub.call(
            self._stub.ResumeRun, control_service_pb2.ResumeRunRequest(), metadata=self._metadata
        )

    async def save_run(
        self, checkpoint_id: str, *, timeout_s: float = 600.0
    ) -> tuple[SavedRun, str]:
        """Have every trainer save under one id, and return once all did.

        Args:
            checkpoint_id: Unique in the run; one that is there is returned.
            timeout_s: For the slowest step of any trainer.

        Returns:
            What was saved, and the path of a file at the hub that says the same.

        Raises:
            AstraflowError: INVALID_FIELD, RUN_ENDED; NOT_READY when a trainer is missing or has not
                saved in time.
        """
        request = control_service_pb2.SaveRunRequest(checkpoint_id=checkpoint_id)
        answer = await self._hub.call(
            self._stub.SaveRun, request, metadata=self._metadata, timeout_s=timeout_s
        )
        return decode_saved_run(answer, checkpoint_id=checkpoint_id)

    async def drain_member(self, member_id: MemberId, *, grace_s: float | None = None) -> None:
        """Let a member finish, hand back the rest and leave.

        Args:
            member_id: Which.
            grace_s: Then its session is ended; None: no limit.

        Raises:
            AstraflowError: MEMBER_UNKNOWN.
        """
        request = control_service_pb2.DrainMemberRequest(member_id=member_id)
        if grace_s is not None:
            request.grace.FromTimedelta(timedelta(seconds=grace_s))
        await self._hub.call(self._stub.DrainMember, request, metadata=self._metadata)

    async def scale_advice(self, *, window_s: float | None = None) -> ScaleAdvice:
        """Return how large the pool should be.

        Args:
            window_s: To look back over; None: the window of the recipe.
        """
        request = control_service_pb2.GetScaleAdviceRequest()
        if window_s is not None:
            request.window.FromTimedelta(timedelta(seconds=window_s))
        answer = await self._hub.call(self._stub.GetScaleAdvice, request, metadata=self._metadata)
        return decode_advice(answer.advice)

    async def stop_run(self, mode: StopMode, *, grace_s: float | None = None) -> None:
        """End the run and every session; returns at once.

        Args:
            mode: What becomes of open work.
            grace_s: Time to drain, then as CANCEL; None: no limit.
        """
        request = control_service_pb2.StopRunRequest(mode=STOP_MODES.encode(mode))
        if grace_s is not None:
            request.grace.FromTimedelta(timedelta(seconds=grace_s))
        await self._hub.call(self._stub.StopRun, request, metadata=self._metadata)
