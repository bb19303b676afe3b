"""The members of a run that crashes: processes with the real clients and neither engine nor model.

A node answers every task at once. A trainer's weights are the number of its steps. Both note what
the hub acknowledged, as soon as they know.
"""

import asyncio
import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import sleep

from astraflow.client.payloads import PayloadWriter
from astraflow.client.raas import RaasClient, RolloutStream, dial_pool
from astraflow.client.session import Held, MemberHooks, MemberSession
from astraflow.client.trainer import TrainerBatch, TrainerClient
from astraflow.core.batches import BatchOutcome
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import (
    Contract,
    Directive,
    DirectiveKind,
    JoinPool,
    RaasLoad,
    RegisterTrainer,
    ServedPolicy,
)
from astraflow.core.rollouts import ItemAck, Rollout, TaskResult, VersionSpan
from astraflow.core.tasks import RegisteredCode, RolloutTask, TaskCredit
from astraflow.core.versions import VersionReport, VersionState, WeightEndpoint
from astraflow.rpc.concurrency import beside
from crash_ends.scene import CHECKPOINT_EVERY, JOIN, POLICY, Scene, note, replace_with
from made_up import made_up_rollout, made_up_trajectory, made_up_version

_CAPACITY = 16
_TOKEN_COUNT = 128
_PROMPT_COUNT = 8
# Hubs that live for less than a second each must not add up to one that is gone.
_PATIENCE_S = 120.0
_LOOK_S = 0.005
_ID = PolicyId(POLICY)


class _NotedStream(RolloutStream):
    """Notes what the hub acknowledged."""

    def __init__(self, session: MemberSession, *, path: Path, name: str) -> None:
        super().__init__(session)
        self._path = path
        self._name = name

    def _acknowledge(self, acks: Iterable[ItemAck]) -> None:
        acks = list(acks)
        for ack in acks:
            row = {"node": self._name, "id": ack.item_id, "disposition": ack.disposition}
            note(self._path, row)
        super()._acknowledge(acks)


class Node:
    """A node without an engine."""

    def __init__(self, scene: Scene, name: str) -> None:
        self._scene = scene
        self._name = name
        self._version = -1
        self._results: RolloutStream | None = None
        self._payloads: PayloadWriter | None = None
        self._sending = set[asyncio.Task[None]]()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Work until the run is over."""
        hooks = MemberHooks(
            load=lambda: RaasLoad(capacity=_CAPACITY), held=self._held, directed=self._directed
        )
        address = self._scene.run_dir.read_endpoint().address
        async with dial_pool(
            address,
            token=JOIN,
            join=self._request(),
            hooks=hooks,
            describe=self._renewed,
            patience_s=_PATIENCE_S,
        ) as client:
            try:
                await self._serve(client)
            except AstraflowError as error:
                if error.reason is not Reason.RUN_ENDED:
                    raise

    async def _serve(self, client: RaasClient) -> None:
        await client.join()
        results = _NotedStream(client.session, path=self._scene.acked, name=self._name)
        self._results = results
        if client.payload_store is not None:
            self._payloads = PayloadWriter(client.payload_store)
        tasks = client.tasks(
            credit=TaskCredit(max_outstanding=_CAPACITY),
            take=self._answer,
        )
        async with beside(client.session.run(), results.run(), self._follow(client), tasks.run()):
            await self._over.wait()
            await results.flush()
        await client.session.end("the run is over")

    def _request(self) -> JoinPool:
        return JoinPool(
            name=self._name,
            contract=Contract(),
            capacity=_CAPACITY,
            policies=(ServedPolicy(policy_id=_ID, max_context_token_count=_TOKEN_COUNT),),
            codes=(RegisteredCode(name="single_turn"),),
        )

    def _renewed(self, join: JoinPool) -> JoinPool:
        """Say what is live: a session that was lost knows of nothing, and no version may follow."""
        (served,) = join.policies
        version = None if self._version < 0 else self._version
        return replace(join, policies=(replace(served, version=version),))

    async def _follow(self, client: RaasClient) -> None:
        async for info in client.versions.watch(_ID):
            if info.version > self._version:
                self._version = info.version
                report = VersionReport(policy_id=_ID, version=info.version, state=VersionState.LIVE)
                await client.versions.report(report)

    def _answer(self, task: RolloutTask) -> None:
        sending = asyncio.create_task(self._send(task))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _send(self, task: RolloutTask) -> None:
        if self._results is None:
            raise RuntimeError("a task came before the join")
        for index in task.sample_indexes:
            sample = _sample(task, index, self._version)
            if self._payloads is not None:
                sample = await self._payloads.put(sample)
            self._results.send(sample)
        count = len(task.sample_indexes)
        self._results.close_task(TaskResult(task_id=task.task_id, rollout_count=count))

    def _held(self) -> Held:
        results = self._results
        return Held(task_ids=tuple(results.unacked_results) if results else ())

    def _directed(self, directive: Directive) -> None:
        if directive.kind is not DirectiveKind.CONTINUE:
            self._over.set()


def _sample(task: RolloutTask, index: int, version: int) -> Rollout:
    name = f"{task.task_id}/{index}"
    span = VersionSpan(version=version, length=_TOKEN_COUNT - _PROMPT_COUNT)
    trajectory = made_up_trajectory(f"{name}/{POLICY}", _ID, [span], prompt_count=_PROMPT_COUNT)
    return made_up_rollout(
        trajectory,
        rollout_id=name,
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=index,
        reward=float(index % 2),
    )


class CountingTrainer:
    """A trainer whose weights are the number of its steps; it begins at its newest checkpoint."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._step_count = scene.read_recipe().policies[POLICY].trainer.step_count
        self._next_version = 0

    def run(self) -> None:
        """Train until the data ends."""
        starts = [json.loads(p.read_text()) for p in self._checkpoints()]
        for start in (*starts, {"step": 0, "version": None, "checkpoint_id": ""}):
            try:
                self._train_from(**start)
            except AstraflowError as error:
                # One that was written and not acknowledged.
                if error.reason is not Reason.CHECKPOINT_UNKNOWN:
                    raise
            else:
                return

    def _checkpoints(self) -> list[Path]:
        return sorted(self._scene.checkpoints.glob("step_*"), reverse=True)

    def _train_from(self, *, step: int, version: int | None, checkpoint_id: str) -> None:
        register = RegisterTrainer(
            policy_id=_ID,
            name=f"trainer-{POLICY}",
            contract=Contract(),
            groups_per_batch=2,
            checkpoint_id=checkpoint_id,
            last_step=step,
            version=version,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint="127.0.0.1:1"),),
        )
        with ExitStack() as stack:
            client = _entered(stack, self._scene, register)
            note(self._scene.trained, {"starts_at": step})
            self._next_version = client.registration.next_version
            self._publish(client, step, restored_from=version)
            for batch in client.batches():
                step += 1
                self._await_leave_for(step)
                self._train(client, batch, step)

    def _train(self, client: TrainerClient, batch: TrainerBatch, step: int) -> None:
        fresh = [
            name
            for part in batch.parts
            for name, uses in zip(part.rollout_ids, part.values("use_count"), strict=True)
            if not uses
        ]
        batch_id = batch.header.batch_id
        note(self._scene.trained, {"step": step, "batch_id": batch_id, "rollouts": fresh})
        self._publish(client, step)
        name = self._save(step)
        client.ack(batch_id, BatchOutcome.CONSUMED, step=step, checkpoint_id=name)
        note(self._scene.trained, {"acked": batch_id, "step": step})

    def _save(self, step: int) -> str:
        """Write a checkpoint where one is due; return its id, or nothing."""
        if step % CHECKPOINT_EVERY and step != self._step_count:
            return ""
        name = f"step_{step:06d}"
        state = {"step": step, "version": self._next_version - 1, "checkpoint_id": name}
        replace_with(self._scene.checkpoints / name, json.dumps(state))
        return name

    def _publish(
        self, client: TrainerClient, step: int, *, restored_from: int | None = None
    ) -> None:
        # The weights are the number of steps.
        content = step.to_bytes(16, "little")
        info = made_up_version(
            _ID, self._next_version, step=step, content=content, restored_from=restored_from
        )
        self._next_version = client.publish_version(info)

    def _await_leave_for(self, step: int) -> None:
        while int(self._scene.allowed.read_text()) < step:
            sleep(_LOOK_S)


def _entered(stack: ExitStack, scene: Scene, register: RegisterTrainer) -> TrainerClient:
    """Register, once the session of a predecessor has ended."""
    address = scene.run_dir.read_endpoint().address
    while True:
        client = TrainerClient(hub=address, token=JOIN, register=register, patience_s=_PATIENCE_S)
        try:
            return stack.enter_context(client)
        except AstraflowError as error:
            if error.reason is not Reason.POLICY_TAKEN:
                raise
        sleep(_LOOK_S * 10)
