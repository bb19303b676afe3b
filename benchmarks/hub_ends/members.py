"""Nodes and a trainer whose own work costs nothing, as raw calls of the contract."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio

from astraflow.core.members import Capability, Contract, JoinPool, RegisterTrainer, ServedPolicy
from astraflow.core.tasks import RegisteredCode
from astraflow.core.versions import VersionReport, VersionState, WeightEndpoint
from astraflow.rpc.auth import bearer, session_metadata
from astraflow.wire import dataflow, versions
from astraflow.wire.fields import encode_tensor
from astraflow_proto.dataflow.v1 import raas_service_pb2 as raas_pb
from astraflow_proto.dataflow.v1 import session_service_pb2, trainer_service_pb2
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub
from astraflow_proto.dataflow.v1.session_service_pb2_grpc import SessionServiceStub
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub
from astraflow_proto.rollout.v1 import rollout_pb2, trajectory_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub
from hub_ends.process import GROUPS_PER_BATCH, POLICY, TOKEN
from made_up import made_up_version

_CREDIT = 1 << 16


class Node:
    """A RaaS on a connection of its own."""

    def __init__(self, channel: aio.Channel, made: rollout_pb2.Rollout) -> None:
        self.channel = channel
        self.session: Any = None
        self._made = made
        self._store: Path | None = None
        self._payload_count = 0

    async def join(self, number: int, *, capacity: int = _CREDIT) -> None:
        """Open its session."""
        join = JoinPool(
            name=f"node{number}",
            contract=Contract(),
            capacity=capacity,
            policies=(ServedPolicy(policy_id=POLICY, max_context_token_count=_CREDIT),),
            codes=(RegisteredCode(name="single_turn"),),
        )
        answer = await RaasServiceStub(self.channel).JoinPool(
            dataflow.encode_join_pool(join), metadata=bearer(TOKEN)
        )
        self.session = session_metadata(answer.session.token)
        if answer.HasField("payload_store"):
            self._store = Path(answer.payload_store.url.removeprefix("file://"))

    async def report(self, version: int) -> None:
        """Say that it serves a version."""
        report = VersionReport(policy_id=POLICY, version=version, state=VersionState.LIVE)
        await VersionServiceStub(self.channel).ReportVersion(
            versions.encode_version_report(report), metadata=self.session
        )

    async def open_tasks(self, credit: int = _CREDIT) -> Any:
        """Open the stream of tasks."""
        stream = RaasServiceStub(self.channel).StreamTasks(metadata=self.session)
        request = raas_pb.StreamTasksRequest()
        request.open.credit.max_outstanding = credit
        await stream.write(request)
        return stream

    def open_rollouts(self) -> Any:
        """Open the stream of rollouts."""
        return RaasServiceStub(self.channel).StreamRollouts(metadata=self.session)

    def answers(self, task: Any, version: int) -> list[raas_pb.RolloutItem]:
        """Return the rollouts of a task, and its result."""
        items: list[raas_pb.RolloutItem] = []
        for index in task.sample_indexes:
            item = raas_pb.RolloutItem(rollout=self._made)
            item.rollout.rollout_id = item.rollout.trajectories[0].trajectory_id = (
                f"{task.task_id}/{index}"
            )
            item.rollout.task_id, item.rollout.group_id = task.task_id, task.group_id
            item.rollout.sample_index, item.rollout.reward = index, float(index % 2)
            item.rollout.trajectories[0].version_spans[0].version = version
            if self._store is not None:
                item.rollout.trajectories[0].payload.name = self._new_payload(self._store)
            items.append(item)
        closing = raas_pb.RolloutItem()
        closing.result.task_id, closing.result.rollout_count = task.task_id, len(items)
        return [*items, closing]

    def _new_payload(self, store: Path) -> str:
        """Leave something that the hub can remove, and return its name."""
        self._payload_count += 1
        name = f"{id(self):x}-{self._payload_count}"
        os.close(os.open(store / name, os.O_CREAT | os.O_WRONLY))
        return name


class Members:
    """Nodes and one trainer.

    Attributes:
        nodes: The first one on the connection of the trainer.
        version: The newest one.
        step: Batches trained on.
    """

    def __init__(
        self,
        channel: aio.Channel,
        token_count: int,
        *,
        more: Sequence[aio.Channel] = (),
        publish_every: int = 1,
        has_payloads: bool = False,
    ) -> None:
        """Make members that have not joined.

        Args:
            channel: Of the trainer and the first node.
            token_count: Of each rollout.
            more: One per further node.
            publish_every: Batches from one version to the next.
            has_payloads: Whether rollouts only name where their arrays are.
        """
        made = _rollout(token_count)
        if has_payloads:
            _refer(made.trajectories[0], token_count)
        self.channel = channel
        self.nodes = [Node(each, made) for each in (channel, *more)]
        self.version = -1
        self.step = 0
        self.trainer: Any = None
        self._publish_every = publish_every

    async def join(self, *, capacity: int = _CREDIT) -> None:
        """Open all sessions, and publish the first version."""
        request = RegisterTrainer(
            policy_id=POLICY,
            name="trainer",
            contract=Contract(capabilities=frozenset({Capability.PAYLOADS})),
            groups_per_batch=GROUPS_PER_BATCH,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint="127.0.0.1:1"),),
        )
        answer = await TrainerServiceStub(self.channel).RegisterTrainer(
            dataflow.encode_register_trainer(request), metadata=bearer(TOKEN)
        )
        self.trainer = session_metadata(answer.session.token)
        for number, node in enumerate(self.nodes):
            await node.join(number, capacity=capacity)
        await self.publish()

    async def publish(self) -> None:
        """Publish the next version, and have the nodes serve it."""
        info = made_up_version(POLICY, self.version + 1, step=self.step)
        request = trainer_service_pb2.PublishVersionRequest(
            version=versions.encode_version_info(info)
        )
        await TrainerServiceStub(self.channel).PublishVersion(request, metadata=self.trainer)
        await asyncio.gather(*(node.report(self.version + 1) for node in self.nodes))
        self.version += 1

    async def settle(self, batch_id: str) -> None:
        """Train on a batch."""
        self.step += 1
        if self.step % self._publish_every == 0:
            await self.publish()
        ack = trainer_service_pb2.AckBatchRequest(
            batch_id=batch_id, outcome=trainer_service_pb2.BATCH_OUTCOME_CONSUMED, step=self.step
        )
        await TrainerServiceStub(self.channel).AckBatch(ack, metadata=self.trainer)

    async def open_tasks(self) -> Any:
        """Open the first node's stream of tasks."""
        return await self.nodes[0].open_tasks()

    def open_rollouts(self) -> Any:
        """Open the first node's stream of rollouts."""
        return self.nodes[0].open_rollouts()

    def answers(self, task: Any) -> list[raas_pb.RolloutItem]:
        """Return the rollouts of a task, and its result."""
        return self.nodes[0].answers(task, self.version)

    def open_batches(self, max_outstanding: int) -> Any:
        """Open the stream of batches."""
        request = trainer_service_pb2.StreamBatchesRequest(
            world_size=1, max_outstanding=max_outstanding, sources=True
        )
        return TrainerServiceStub(self.channel).StreamBatches(request, metadata=self.trainer)

    async def keep_alive(self) -> None:
        """Keep all sessions, for ever."""
        while True:
            for node in self.nodes:
                await SessionServiceStub(node.channel).KeepAlive(
                    session_service_pb2.KeepAliveRequest(), metadata=node.session
                )
            await SessionServiceStub(self.channel).KeepAlive(
                session_service_pb2.KeepAliveRequest(), metadata=self.trainer
            )
            await asyncio.sleep(5)


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


def _refer(trajectory: trajectory_pb2.Trajectory, token_count: int) -> None:
    for name in ("tokens", "sampled_mask", "logprobs"):
        trajectory.ClearField(name)
    trajectory.payload.digest = bytes(32)
    trajectory.payload.nbytes = 9 * token_count
    trajectory.payload.token_count = token_count
