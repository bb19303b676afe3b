"""The run as its operator sees it: state, books, evaluations, and the means to steer it."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Self

from astraflow.client.evals import EvalClient
from astraflow.client.hub import Hub
from astraflow.client.ledger import LedgerClient
from astraflow.core.autoscale import ScaleAdvice
from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.saves import SavedRun
from astraflow.core.status import RunStatus, StopMode
from astraflow.core.versions import VersionInfo
from astraflow.rpc.auth import bearer
from astraflow.rpc.tls import Tls
from astraflow.wire.control import STOP_MODES, decode_run_status, decode_saved_run
from astraflow.wire.scale import decode_advice
from astraflow.wire.versions import decode_version_info
from astraflow_proto.control.v1 import control_service_pb2
from astraflow_proto.control.v1.control_service_pb2_grpc import ControlServiceStub
from astraflow_proto.weights.v1 import version_service_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub


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
        self._hub = Hub(hub, tls=tls, patience_s=patience_s)
        self._metadata = bearer(token)
        self._stub = ControlServiceStub(self._hub.channel)
        self._versions = VersionServiceStub(self._hub.channel)
        self.ledger = LedgerClient(self._hub, metadata=self._metadata)
        self.evals = EvalClient(self._hub, metadata=self._metadata)

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Close the channel."""
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
        """Undo `pause_run`."""
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
