"""A node and a trainer whose own work costs nothing, as raw calls of the contract."""

import asyncio
from typing import Any

import numpy as np
from grpc import aio

from astraflow.core.members import Contract, JoinPool, RegisterTrainer, ServedPolicy
from astraflow.core.tasks import RegisteredCode
from astraflow.core.versions import VersionReport, VersionState, WeightEndpoint
from astraflow.rpc.auth import bearer, session_metadata
from astraflow.simulate.made_up import made_up_version
from astraflow.wire import raas, trainer, versions
from astraflow.wire.fields import encode_tensor
from astraflow_proto.dataflow.v1 import raas_service_pb2 as raas_pb
from astraflow_proto.dataflow.v1 import session_service_pb2, trainer_service_pb2
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub
from astraflow_proto.dataflow.v1.session_service_pb2_grpc import SessionServiceStub
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub
from astraflow_proto.rollout.v1 import rollout_pb2, trajectory_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub
from hub_ends.process import GROUPS_PER_BATCH, POLICY, TOKEN

_CREDIT = 1 << 16


class Members:
    """One node and one trainer.

    Attributes:
        version: The newest one.
        step: Batches trained on.
    """

    def __init__(self, channel: aio.Channel, token_count: int) -> None:
        self.channel = channel
        self.version = -1
        self.step = 0
        self.raas: Any = None
        self.trainer: Any = None
        self._made = _rollout(token_count)

    async def join(self) -> None:
        """Open both sessions, and publish the first version."""
        request = RegisterTrainer(
            policy_id=POLICY,
            name="trainer",
            contract=Contract(),
            groups_per_batch=GROUPS_PER_BATCH,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint="127.0.0.1:1"),),
        )
        answer = await TrainerServiceStub(self.channel).RegisterTrainer(
            trainer.encode_register_trainer(request), metadata=bearer(TOKEN)
        )
        self.trainer = session_metadata(answer.session.token)
        join = JoinPool(
            name="node",
            contract=Contract(),
            capacity=_CREDIT,
            policies=(ServedPolicy(policy_id=POLICY, max_context_token_count=_CREDIT),),
            codes=(RegisteredCode(name="single_turn"),),
        )
        answer = await RaasServiceStub(self.channel).JoinPool(
            raas.encode_join_pool(join), metadata=bearer(TOKEN)
        )
        self.raas = session_metadata(answer.session.token)
        await self.publish()

    async def publish(self) -> None:
        """Publish the next version, and have the node serve it."""
        self.version += 1
        info = made_up_version(POLICY, self.version, step=self.step)
        request = trainer_service_pb2.PublishVersionRequest(
            version=versions.encode_version_info(info)
        )
        await TrainerServiceStub(self.channel).PublishVersion(request, metadata=self.trainer)
        report = VersionReport(policy_id=POLICY, version=self.version, state=VersionState.LIVE)
        await VersionServiceStub(self.channel).ReportVersion(
            versions.encode_version_report(report), metadata=self.raas
        )

    async def settle(self, batch_id: str) -> None:
        """Train on a batch."""
        self.step += 1
        await self.publish()
        ack = trainer_service_pb2.AckBatchRequest(
            batch_id=batch_id, outcome=trainer_service_pb2.BATCH_OUTCOME_CONSUMED, step=self.step
        )
        await TrainerServiceStub(self.channel).AckBatch(ack, metadata=self.trainer)

    async def open_tasks(self) -> Any:
        """Open the stream of tasks."""
        stream = RaasServiceStub(self.channel).StreamTasks(metadata=self.raas)
        request = raas_pb.StreamTasksRequest()
        request.open.credit.max_outstanding = _CREDIT
        await stream.write(request)
        return stream

    def open_rollouts(self) -> Any:
        """Open the stream of rollouts."""
        return RaasServiceStub(self.channel).StreamRollouts(metadata=self.raas)

    def open_batches(self, max_outstanding: int) -> Any:
        """Open the stream of batches."""
        request = trainer_service_pb2.StreamBatchesRequest(
            world_size=1, max_outstanding=max_outstanding
        )
        return TrainerServiceStub(self.channel).StreamBatches(request, metadata=self.trainer)

    def answers(self, task: Any) -> list[raas_pb.RolloutItem]:
        """Return the rollouts of a task, and its result."""
        items: list[raas_pb.RolloutItem] = []
        for index in task.sample_indexes:
            item = raas_pb.RolloutItem(rollout=self._made)
            item.rollout.rollout_id = item.rollout.trajectories[0].trajectory_id = (
                f"{task.task_id}/{index}"
            )
            item.rollout.task_id, item.rollout.group_id = task.task_id, task.group_id
            item.rollout.sample_index, item.rollout.reward = index, float(index % 2)
            item.rollout.trajectories[0].version_spans[0].version = self.version
            items.append(item)
        closing = raas_pb.RolloutItem()
        closing.result.task_id, closing.result.rollout_count = task.task_id, len(items)
        return [*items, closing]

    async def keep_alive(self) -> None:
        """Keep both sessions, for ever."""
        stub = SessionServiceStub(self.channel)
        while True:
            for member in (self.raas, self.trainer):
                await stub.KeepAlive(session_service_pb2.KeepAliveRequest(), metadata=member)
            await asyncio.sleep(2)


def _rollout(token_count: int) -> rollout_pb2.Rollout:
    mask = np.ones(token_count, bool)
    mask[:100] = False
    tokens = np.random.default_rng(0).integers(0, 150_000, token_count, np.int32)
    trajectory = trajectory_pb2.Trajectory(
        trajectory_id="x",
        policy_id=POLICY,
        tokens=encode_tensor(tokens),
        sampled_mask=encode_tensor(mask),
        logprobs=encode_tensor(np.where(mask, -0.5, 0).astype(np.float32)),
        finish_reason=trajectory_pb2.FINISH_REASON_STOP,
    )
    trajectory.version_spans.add(length=int(mask.sum()), kv=trajectory_pb2.KV_POLICY_UNSPECIFIED)
    trajectory.sampling.temperature = trajectory.sampling.top_p = 1.0
    trajectory.sampling.repetition_penalty = 1.0
    return rollout_pb2.Rollout(
        rollout_id="x", outcome=rollout_pb2.OUTCOME_SCORED, trajectories=[trajectory]
    )
