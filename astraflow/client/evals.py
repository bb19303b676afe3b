"""Evaluations of pinned versions, asked for and followed."""

import uuid
from collections.abc import AsyncIterator, Mapping

from astraflow.client.hub import Hub
from astraflow.core.evals import EvalRun, EvalSuite
from astraflow.core.ids import EvalRunId, PolicyId
from astraflow.rpc.auth import MetadataPairs
from astraflow.wire.evals import decode_eval_run, decode_eval_suite
from astraflow_proto.evals.v1 import eval_service_pb2
from astraflow_proto.evals.v1.eval_service_pb2_grpc import EvalServiceStub


class EvalClient:
    """EvalService for an operator."""

    def __init__(self, hub: Hub, *, metadata: MetadataPairs) -> None:
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

    async def suites(self) -> tuple[EvalSuite, ...]:
        """Return the suites of the recipe, by name."""
        answer = await self._hub.call(
            self._stub.ListEvalSuites,
            eval_service_pb2.ListEvalSuitesRequest(),
            metadata=self._metadata,
        )
        return tuple(map(decode_eval_suite, answer.suites))
