"""A real hub on a loopback socket, and members that speak to it with the generated stubs."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.batches import AckBatch, BatchOutcome, EndOfData, StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import (
    Contract,
    DirectiveKind,
    JoinPool,
    RaasLoad,
    RegisterTrainer,
    ServedPolicy,
    Session,
    SessionResume,
)
from astraflow.core.rollouts import Outcome, Rollout, TaskResult, VersionSpan
from astraflow.core.status import RunStatus
from astraflow.core.tasks import RegisteredCode, RolloutTask
from astraflow.core.versions import VersionReport, VersionState, WeightEndpoint
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.server import serve_hub
from astraflow.rpc.access import HubTokens
from astraflow.rpc.auth import bearer, session_metadata
from astraflow.rpc.channel import dial
from astraflow.rpc.errors import raised_from, translate_errors
from astraflow.testing import small_recipe
from astraflow.wire import common, dataflow, versions
from astraflow.wire.rollout import (
    decode_batch_header,
    decode_batch_part,
    decode_end_of_data,
    encode_rollout,
    encode_task_result,
)
from astraflow.wire.tasks import decode_rollout_task
from astraflow_proto.control.v1.control_service_pb2_grpc import ControlServiceStub
from astraflow_proto.control.v1.ledger_service_pb2 import GetLedgerRequest
from astraflow_proto.control.v1.ledger_service_pb2_grpc import LedgerServiceStub
from astraflow_proto.dataflow.v1 import raas_service_pb2, session_service_pb2
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import RaasServiceStub
from astraflow_proto.dataflow.v1.session_service_pb2_grpc import SessionServiceStub
from astraflow_proto.dataflow.v1.trainer_service_pb2 import PublishVersionRequest
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub
from astraflow_proto.evals.v1.eval_service_pb2_grpc import EvalServiceStub
from astraflow_proto.weights.v1 import version_service_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub
from made_up import made_up_trajectory, made_up_version

TOKENS = HubTokens(join="join", operator="operator")
CONTRACT = Contract(software="test")


def make_recipe(folder: Path, *, rows: int = 64, policies=("solver",), **changes: Any) -> Recipe:
    """Return a small recipe; `changes` are dotted keys with __ for the dots."""
    return small_recipe(
        folder,
        prompts=[{"prompt": f"row {n}"} for n in range(rows)],
        policies=policies,
        changes={key.replace("__", "."): value for key, value in changes.items()},
    )


@dataclass
class Scene:
    """A hub that serves, and how to reach it."""

    hub: Hub
    address: str
    run_dir: RunDir
    channel: aio.Channel
    serving: asyncio.Task[RunStatus]

    @property
    def control(self):
        return ControlServiceStub(self.channel)

    @property
    def ledger(self):
        return LedgerServiceStub(self.channel)

    @property
    def evals(self):
        return EvalServiceStub(self.channel)

    tokens = TOKENS

    @property
    def operator(self):
        return bearer(TOKENS.operator)

    def raas(self, name="raas-1", **changes) -> "FakeRaas":
        return FakeRaas(channel=self.channel, name=name, **changes)

    def trainer(self, policy_id="solver", **changes) -> "FakeTrainer":
        return FakeTrainer(channel=self.channel, policy_id=policy_id, **changes)

    async def begin(self, *, answered=True):
        """Have one trainer and one node; return them with the node's first task."""
        trainer, raas = self.trainer(), self.raas()
        await trainer.register()
        await trainer.publish()
        await raas.join()
        await raas.report_version("solver", 0)
        raas.live["solver"] = 0
        tasks, rollouts = await raas.open_tasks(), await raas.open_rollouts()
        task = decode_rollout_task((await tasks.read()).task)
        if answered:
            await raas.answer(rollouts, task)
        return trainer, raas, task

    async def books(self):
        response = await self.ledger.GetLedger(GetLedgerRequest(), metadata=self.operator)
        (account,) = response.accounts
        return account


@pytest.fixture
def recipe_of(tmp_path):
    return lambda **changes: make_recipe(tmp_path, **changes)


@asynccontextmanager
async def hub_in(folder: Path, recipe: Recipe, **options):
    """Serve a run in a folder."""
    ready: asyncio.Future[tuple[Hub, str]] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(
            serve_hub(
                recipe,
                run_dir=folder,
                tokens=TOKENS,
                on_ready=lambda hub, address: ready.set_result((hub, address)),
                **options,
            )
        )
        await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
        hub, address = ready.result() if ready.done() else (await serving, "")
        async with dial(address) as channel:
            yield Scene(hub, address, RunDir(folder), channel, serving)
        serving.cancel()


@pytest.fixture(scope="session")
def serve_in():
    return hub_in


@pytest.fixture(scope="session")
def recipe_in():
    return make_recipe


@pytest.fixture
def start_hub(tmp_path):
    return partial(hub_in, tmp_path / "run")


@contextmanager
def waiting_journal(scene: Scene):
    """Keep a hub from its journal, as another process that has the file would."""
    with closing(sqlite3.connect(scene.run_dir.journal, isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield
        database.execute("ROLLBACK")


@pytest.fixture
def journal_that_waits():
    return waiting_journal


@dataclass(kw_only=True)
class Member:
    """What both kinds of members do."""

    channel: aio.Channel
    token: bytes = b""
    member_id: str = ""
    keep_alive_s: float = 0.0

    @property
    def metadata(self):
        return session_metadata(self.token)

    def take(self, session: Session):
        self.token, self.member_id = session.token, session.member_id
        self.keep_alive_s = session.keep_alive_interval.total_seconds()

    async def keep_alive(self, load: RaasLoad | None = None):
        request = session_service_pb2.KeepAliveRequest()
        if load is not None:
            request.raas.CopyFrom(common.encode_raas_load(load))
        with translate_errors():
            return await SessionServiceStub(self.channel).KeepAlive(request, metadata=self.metadata)

    async def leave(self):
        with translate_errors():
            await SessionServiceStub(self.channel).EndSession(
                session_service_pb2.EndSessionRequest(message="bye"), metadata=self.metadata
            )

    async def report_version(self, policy_id, version, state=VersionState.LIVE, **fields):
        report = VersionReport(policy_id=policy_id, version=version, state=state, **fields)
        with translate_errors():
            await VersionServiceStub(self.channel).ReportVersion(
                versions.encode_version_report(report), metadata=self.metadata
            )

    def watch_versions(self, policy_id, after=None):
        request = version_service_pb2.WatchVersionsRequest(policy_id=policy_id, after_version=after)
        return VersionServiceStub(self.channel).WatchVersions(request, metadata=self.metadata)


@dataclass(kw_only=True)
class FakeRaas(Member):
    """A RaaS whose samples are made up at once."""

    name: str
    policies: tuple[str, ...] = ("solver",)
    capacity: int = 64
    live: dict[str, int] = field(default_factory=dict)
    reward_of: Any = None
    tasks_seen: list[RolloutTask] = field(default_factory=list)
    acks: list[Any] = field(default_factory=list)

    async def join(self, resume: SessionResume | None = None, *, token: str = TOKENS.join):
        request = JoinPool(
            name=self.name,
            contract=CONTRACT,
            resume=resume,
            capacity=self.capacity,
            policies=tuple(
                ServedPolicy(policy_id=name, max_context_token_count=64) for name in self.policies
            ),
            codes=(RegisteredCode(name="single_turn"),),
        )
        with translate_errors():
            response = await RaasServiceStub(self.channel).JoinPool(
                dataflow.encode_join_pool(request), metadata=bearer(token)
            )
        membership = dataflow.decode_pool_membership(response)
        self.take(membership.session)
        return membership

    async def open_tasks(self, credit=64):
        stream = RaasServiceStub(self.channel).StreamTasks(metadata=self.metadata)
        request = raas_service_pb2.StreamTasksRequest()
        request.open.credit.max_outstanding = credit
        # A stream that is refused may be over before this leaves; who reads it gets to know.
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await stream.write(request)
        return stream

    async def open_rollouts(self):
        return RaasServiceStub(self.channel).StreamRollouts(metadata=self.metadata)

    def samples(self, task: RolloutTask) -> list[Rollout]:
        return [self.sample(task, index) for index in task.sample_indexes]

    def sample(self, task: RolloutTask, index: int, **changes) -> Rollout:
        reward = float(index % 2) if self.reward_of is None else self.reward_of(task, index)
        name = f"{task.task_id}/{index}"
        trajectories = tuple(
            made_up_trajectory(
                f"{name}/{policy}",
                policy,
                [VersionSpan(version=self.live.get(policy, 0), length=3)],
            )
            for policy in task.versions
        )
        fields: dict[str, Any] = {
            "rollout_id": name,
            "task_id": task.task_id,
            "group_id": task.group_id,
            "sample_index": index,
            "outcome": Outcome.SCORED,
            "reward": reward,
            "trajectories": trajectories,
        }
        return Rollout(**(fields | changes))

    async def send(self, stream, item: Rollout | TaskResult):
        (ack,) = await self.send_all(stream, [item])
        return ack

    async def send_all(self, stream, items: list[Rollout | TaskResult]):
        request = raas_service_pb2.StreamRolloutsRequest()
        for item in items:
            if isinstance(item, Rollout):
                request.items.add().rollout.CopyFrom(encode_rollout(item))
            else:
                request.items.add().result.CopyFrom(encode_task_result(item))
        await stream.write(request)
        acks = []
        while len(acks) < len(items):
            acks += map(dataflow.decode_item_ack, (await stream.read()).acks)
        self.acks += acks
        return acks

    async def answer(self, stream, task: RolloutTask):
        samples = self.samples(task)
        result = TaskResult(task_id=task.task_id, rollout_count=len(samples))
        await self.send_all(stream, [*samples, result])

    async def follow(self, policy_id):
        """Report every version as live as soon as it is announced."""
        async for message in self.watch_versions(policy_id):
            version = message.version.version
            if version > self.live.get(policy_id, -1):
                self.live[policy_id] = version
                await self.report_version(policy_id, version)

    async def work(self):
        """Do what is asked until the run says stop; then leave."""
        async with asyncio.TaskGroup() as group:
            followers = [group.create_task(self.follow(policy)) for policy in self.policies]
            tasks, rollouts = await self.open_tasks(self.capacity), await self.open_rollouts()
            while (message := await tasks.read()) is not aio.EOF:
                if message.HasField("task"):
                    task = decode_rollout_task(message.task)
                    self.tasks_seen.append(task)
                    await self.answer(rollouts, task)
                elif message.HasField("directive"):
                    directive = common.decode_directive(message.directive)
                    if directive.kind is not DirectiveKind.CONTINUE:
                        break
            await self.leave()
            for follower in followers:
                follower.cancel()


@dataclass(kw_only=True)
class FakeTrainer(Member):
    """A trainer whose weights are a number."""

    policy_id: str
    groups_per_batch: int = 2
    step: int = 0
    next_version: int = 0
    headers: list[Any] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)
    end: EndOfData | None = None
    until: Callable[[], bool] = lambda: False

    async def register(self, *, token=TOKENS.join, **changes):
        request = RegisterTrainer(
            policy_id=self.policy_id,
            name=f"trainer-{self.policy_id}",
            contract=CONTRACT,
            groups_per_batch=self.groups_per_batch,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint="127.0.0.1:1"),),
            **changes,
        )
        with translate_errors():
            response = await TrainerServiceStub(self.channel).RegisterTrainer(
                dataflow.encode_register_trainer(request), metadata=bearer(token)
            )
        registration = dataflow.decode_trainer_registration(response)
        self.take(registration.session)
        self.next_version = registration.next_version
        return registration

    async def publish(self, info=None):
        info = info or made_up_version(self.policy_id, self.next_version, step=self.step)
        with translate_errors():
            response = await TrainerServiceStub(self.channel).PublishVersion(
                PublishVersionRequest(version=versions.encode_version_info(info)),
                metadata=self.metadata,
            )
        self.next_version = response.next_version

    def batches(self, *, sources=False, **changes):
        request = dataflow.encode_stream_batches(StreamBatches(**changes))
        request.sources = sources
        return TrainerServiceStub(self.channel).StreamBatches(request, metadata=self.metadata)

    async def ack(self, batch_id, outcome=BatchOutcome.CONSUMED, **changes):
        fields = {"step": self.step, "metrics": {"train/loss": 0.5}} | changes
        ack = AckBatch(
            batch_id=batch_id,
            outcome=outcome,
            wait_s=1,
            train_s=3,
            **fields,
        )
        with translate_errors():
            response = await TrainerServiceStub(self.channel).AckBatch(
                dataflow.encode_ack_batch(ack), metadata=self.metadata
            )
        return response.settled

    async def work(self):
        """Publish; train until the data ends or it is enough; then leave."""
        await self.publish()
        await self.train()

    async def train(self):
        """Do so as one that has published already."""
        stream = self.batches()
        while (message := await stream.read()) is not aio.EOF:
            match message.WhichOneof("event"):
                case "header":
                    header = decode_batch_header(message.header)
                    self.headers.append(header)
                    for _ in range(header.part_count):
                        part = (await stream.read()).part
                        self.parts.append(decode_batch_part(part))
                    self.step += 1
                    await self.publish()
                    await self.ack(header.batch_id)
                    if self.until():
                        stream.cancel()
                        break
                case "end_of_data":
                    self.end = decode_end_of_data(message.end_of_data)
                case _:
                    pass
        await self.leave()


@pytest.fixture
def raas_at():
    """Return a RaaS that speaks over a channel."""
    return lambda channel, name: FakeRaas(channel=channel, name=name)


@pytest.fixture
def reason_of():
    """Return the reason that a call is refused with."""

    async def ask(call) -> Reason:
        try:
            await call
        except aio.AioRpcError as error:
            return raised_from(error).reason
        except AstraflowError as error:
            return error.reason
        pytest.fail("the call was not refused")

    return ask
