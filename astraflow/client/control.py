"""The run as its operator sees it: state, accounting, evaluations, and the means to steer it."""

import uuid
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Self, TypeVar

from astraflow.client.hub import HubChannel
from astraflow.config.run_dir import RunDir
from astraflow.core.autoscale import ScaleAdvice
from astraflow.core.evals import EvalRun, EvalSuiteInfo
from astraflow.core.events import EvalCreated
from astraflow.core.ids import EvalRunId, MemberId, PolicyId, PromptId
from astraflow.core.status import (
    DeadLetter,
    LedgerAccount,
    RolloutQuery,
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
    STOP_MODES,
    decode_advice,
    decode_dead_letter,
    decode_eval_run,
    decode_eval_suite,
    decode_ledger_account,
    decode_rollout_record,
    decode_run_status,
    decode_saved_run,
    encode_eval_created,
    encode_rollout_query,
)
from astraflow.wire.versions import decode_version_info
from astraflow_proto.control.v1 import control_service_pb2, ledger_service_pb2
from astraflow_proto.control.v1.control_service_pb2_grpc import ControlServiceStub
from astraflow_proto.control.v1.ledger_service_pb2_grpc import LedgerServiceStub
from astraflow_proto.evals.v1 import eval_service_pb2
from astraflow_proto.evals.v1.eval_service_pb2_grpc import EvalServiceStub
from astraflow_proto.weights.v1 import version_service_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub

_PAGE_SIZE = 200


Response = TypeVar("Response")


class _OperatorCalls:
    """Calls to the hub with the operator's token."""

    def __init__(self, hub: HubChannel, *, metadata: MetadataPairs) -> None:
        self._hub = hub
        self._metadata = metadata

    async def _call(
        self, method: Callable[..., Awaitable[Response]], request: object, *, timeout_s: float = 10
    ) -> Response:
        return await self._hub.call(method, request, metadata=self._metadata, timeout_s=timeout_s)

    def _watch(
        self, method: Callable[..., AsyncIterable[Response]], request: object
    ) -> AsyncIterator[Response]:
        return self._hub.watch(method, request, metadata=self._metadata)


class LedgerClient(_OperatorCalls):
    """LedgerService for an operator."""

    def __init__(self, hub: HubChannel, *, metadata: MetadataPairs) -> None:
        super().__init__(hub, metadata=metadata)
        self._stub = LedgerServiceStub(hub.channel)

    async def accounts(self) -> tuple[LedgerAccount, ...]:
        """Return the books at one instant, one account per policy."""
        answer = await self._call(self._stub.GetLedger, ledger_service_pb2.GetLedgerRequest())
        return tuple(map(decode_ledger_account, answer.accounts))

    async def rollouts(
        self, where: RolloutQuery | None = None, *, limit: int = 50
    ) -> AsyncIterator[RolloutRecord]:
        """Yield stored rollouts, newest first, at most `limit`."""
        request = encode_rollout_query(where or RolloutQuery())
        request.view = ledger_service_pb2.ROLLOUT_VIEW_FULL
        async for page in self._pages(self._stub.ListRollouts, request, limit):
            for record in page.rollouts:
                yield decode_rollout_record(record)

    async def dead_letters(self, *, limit: int = 50) -> AsyncIterator[DeadLetter]:
        """Yield the prompts given up, newest first, at most `limit`."""
        request = ledger_service_pb2.ListDeadLettersRequest()
        async for page in self._pages(self._stub.ListDeadLetters, request, limit):
            for letter in page.dead_letters:
                yield decode_dead_letter(letter)

    async def _pages(self, method: Any, request: Any, limit: int) -> AsyncIterator[Any]:
        """Yield the pages of a list, of at most `limit` items together."""
        while limit > 0:
            request.page_size = min(limit, _PAGE_SIZE)
            page: Any = await self._call(method, request)
            yield page
            limit -= request.page_size
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return

    async def requeue(self, prompt_id: PromptId) -> None:
        """Issue a dead letter again.

        Raises:
            AstraflowError: PROMPT_UNKNOWN.
        """
        request = ledger_service_pb2.RequeuePromptRequest(prompt_id=prompt_id)
        await self._call(self._stub.RequeuePrompt, request)

    async def explain_wait(self, policy_id: PolicyId) -> tuple[WaitReason, ...]:
        """Return what a policy's trainer waits for now, link by link; empty: nothing.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        request = ledger_service_pb2.ExplainWaitRequest(policy_id=policy_id)
        answer = await self._call(self._stub.ExplainWait, request)
        return tuple(map(decode_wait_reason, answer.reasons))


class EvalClient(_OperatorCalls):
    """EvalService for an operator."""

    def __init__(self, hub: HubChannel, *, metadata: MetadataPairs) -> None:
        super().__init__(hub, metadata=metadata)
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
        event = EvalCreated(
            request_id=request_id or uuid.uuid4().hex,
            suite=suite,
            versions=versions or {},
            pool_share=pool_share,
        )
        answer = await self._call(self._stub.CreateEvalRun, encode_eval_created(event))
        return decode_eval_run(answer.eval_run)

    async def get(self, eval_run_id: EvalRunId) -> EvalRun:
        """Return where an evaluation stands.

        Raises:
            AstraflowError: EVAL_UNKNOWN.
        """
        request = eval_service_pb2.GetEvalRunRequest(eval_run_id=eval_run_id)
        answer = await self._call(self._stub.GetEvalRun, request)
        return decode_eval_run(answer.eval_run)

    async def watch(self, eval_run_id: EvalRunId) -> AsyncIterator[EvalRun]:
        """Yield where it stands now and after each change, over cuts, until it is final.

        Raises:
            AstraflowError: EVAL_UNKNOWN.
        """
        request = eval_service_pb2.WatchEvalRunRequest(eval_run_id=eval_run_id)
        async for answer in self._watch(self._stub.WatchEvalRun, request):
            yield decode_eval_run(answer.eval_run)

    async def cancel(self, eval_run_id: EvalRunId) -> EvalRun:
        """Stop it; a final one stays as it is.

        Raises:
            AstraflowError: EVAL_UNKNOWN.
        """
        request = eval_service_pb2.CancelEvalRunRequest(eval_run_id=eval_run_id)
        answer = await self._call(self._stub.CancelEvalRun, request)
        return decode_eval_run(answer.eval_run)

    async def suites(self) -> tuple[EvalSuiteInfo, ...]:
        """Return the suites of the recipe, by name."""
        answer = await self._call(
            self._stub.ListEvalSuites, eval_service_pb2.ListEvalSuitesRequest()
        )
        return tuple(map(decode_eval_suite, answer.suites))


class ControlClient(_OperatorCalls):
    """An operator's place at a run."""

    def __init__(
        self, hub: str, *, token: str, tls: Tls | None = None, patience_s: float = 5.0
    ) -> None:
        """Dial nothing; the first call does.

        Args:
            hub: host:port.
            token: The run's operator token.
            tls: None: plain text.
            patience_s: How long the hub is tried again while it cannot be reached.
        """
        super().__init__(HubChannel(hub, tls=tls, patience_s=patience_s), metadata=bearer(token))
        self._stub = ControlServiceStub(self._hub.channel)
        self._versions = VersionServiceStub(self._hub.channel)
        self.ledger = LedgerClient(self._hub, metadata=self._metadata)
        self.evals = EvalClient(self._hub, metadata=self._metadata)

    @classmethod
    def of(cls, run_dir: RunDir, *, patience_s: float = 5.0) -> Self:
        """Return the place of the operator who started a run on this machine.

        Raises:
            AstraflowError: NOT_READY when no hub of this run is known here.
        """
        hub = run_dir.read_endpoint()
        tls = Tls.of(hub.tls)
        return cls(hub.address, token=hub.operator_token, tls=tls, patience_s=patience_s)

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
        answer = await self._call(self._stub.GetRun, control_service_pb2.GetRunRequest())
        return decode_run_status(answer.run)

    async def watch_run(self, *, min_interval_s: float = 1.0) -> AsyncIterator[RunStatus]:
        """Yield the state now and after changes, over cuts, until it is final."""
        request = control_service_pb2.WatchRunRequest()
        request.min_interval.FromTimedelta(timedelta(seconds=min_interval_s))
        async for answer in self._watch(self._stub.WatchRun, request):
            yield decode_run_status(answer.run)

    async def versions(self, policy_id: PolicyId) -> tuple[VersionInfo, ...]:
        """Return what can be pulled of a policy, oldest first.

        Raises:
            AstraflowError: POLICY_UNKNOWN.
        """
        request = version_service_pb2.ListVersionsRequest(policy_id=policy_id)
        answer = await self._call(self._versions.ListVersions, request)
        return tuple(map(decode_version_info, answer.versions))

    async def pause_run(self) -> None:
        """Stop new tasks; what is out finishes."""
        await self._call(self._stub.PauseRun, control_service_pb2.PauseRunRequest())

    async def resume_run(self) -> None:
        await self._call(self._stub.ResumeRun, control_service_pb2.ResumeRunRequest())

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
        answer = await self._call(self._stub.SaveRun, request, timeout_s=timeout_s)
        return decode_saved_run(answer, checkpoint_id=checkpoint_id)

    async def revoke_token(self, token_id: str) -> list[MemberId]:
        """Take a token of a role back, and end the sessions that it opened; return whose.

        Args:
            token_id: 8 hexadecimal digits; see `rpc.access.token_id_of`.

        Raises:
            AstraflowError: INVALID_FIELD.
        """
        request = control_service_pb2.RevokeTokenRequest(token_id=token_id)
        answer = await self._call(self._stub.RevokeToken, request)
        return [MemberId(each) for each in answer.member_ids]

    async def drain_member(self, member_id: MemberId, *, grace_s: float | None = None) -> None:
        """Let a member finish, hand back the rest and leave; its session ends after `grace_s`.

        Raises:
            AstraflowError: MEMBER_UNKNOWN.
        """
        request = control_service_pb2.DrainMemberRequest(member_id=member_id)
        if grace_s is not None:
            request.grace.FromTimedelta(timedelta(seconds=grace_s))
        await self._call(self._stub.DrainMember, request)

    async def scale_advice(self, *, window_s: float | None = None) -> ScaleAdvice:
        """Return how large the pool should be, by the last `window_s`; None: the recipe's."""
        request = control_service_pb2.GetScaleAdviceRequest()
        if window_s is not None:
            request.window.FromTimedelta(timedelta(seconds=window_s))
        answer = await self._call(self._stub.GetScaleAdvice, request)
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
        await self._call(self._stub.StopRun, request)
