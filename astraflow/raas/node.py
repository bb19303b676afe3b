"""A RaaS node: one session, its streams, its engines, from the join until it leaves."""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import structlog
from structlog.contextvars import bind_contextvars

from astraflow.client.payloads import PayloadWriter
from astraflow.client.raas import RaasClient, TaskStream, dial_pool
from astraflow.client.session import Held, MemberHooks
from astraflow.config.pool import Agents
from astraflow.core.clock import SystemClock
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId, WorkflowId
from astraflow.core.members import (
    Capability,
    Contract,
    Directive,
    DirectiveKind,
    JoinPool,
    PoolMembership,
    RaasLoad,
    Resources,
    ServedPolicy,
    Session,
)
from astraflow.core.tasks import RegisteredCode, TaskCredit
from astraflow.core.versions import SourceKind
from astraflow.raas.agents.endpoint import AGENT_TOKEN, AgentEndpoint
from astraflow.raas.failures import NodeFailureLog
from astraflow.raas.metrics import LoadMeter
from astraflow.raas.policies import ServedModel, ServedPolicies
from astraflow.raas.runner import EpisodeRunner, headroom
from astraflow.raas.updater import PublishRequester, Puller, WeightUpdater
from astraflow.rpc.concurrency import beside, either
from astraflow.rpc.tls import Tls
from astraflow.weights.serve.server import RelayServer
from astraflow.workflows.building import build_workflows, close_workflows
from astraflow.workflows.runner import LoadedWorkflow


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a node is.

    Attributes:
        hub: host:port.
        token: The run's join token.
        name: Unique in the pool.
        capacity: Rollouts that it runs at once.
        eval_extra: Rollouts of evaluations that it runs beyond its capacity.
        codes: Workflows and scorers that it has.
        resources: What it runs on.
        region: Where it stands; empty: unknown.
        software: Name and release, for people.
        tls: None: plain text.
        patience_s: How long the hub is tried again while it cannot be reached.
        kinds: Of the sources that weights are pulled from; None: all.
        ask_every: Tasks after which it asks for a newer version, by policy; left out: never.
        agents: How agents reach its policies.
    """

    hub: str
    token: str = field(repr=False)
    name: str
    capacity: int
    eval_extra: int = 0
    codes: tuple[RegisteredCode, ...] = ()
    resources: Resources = field(default_factory=Resources)
    region: str = ""
    software: str = "astraflow"
    tls: Tls | None = None
    patience_s: float = 30.0
    kinds: frozenset[SourceKind] | None = None
    ask_every: Mapping[PolicyId, int] = field(default_factory=dict[PolicyId, int])
    agents: Agents = field(default_factory=Agents)


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class NodeDeparture(StrEnum):
    """Why a node left."""

    DRAINED = "drained"
    STOPPED = "stopped"


class RaasNode:
    """Runs rollouts for a run until it is over, or until it is asked to leave.

    `run` is called once. `drain` and `stop` may be called from a signal handler of the loop.

    Attributes:
        runner: Of its episodes.
        metrics_address: Where its metrics are read; set before `run`, empty: nowhere.
    """

    def __init__(
        self,
        settings: NodeSettings,
        *,
        models: Mapping[PolicyId, ServedModel],
        puller: Callable[[PolicyId], Puller],
        relays: RelayServer | None = None,
    ) -> None:
        """Dial nothing yet; engines and relays, which were started, stay the caller's."""
        self._settings = settings
        self._meter = LoadMeter(SystemClock())
        self._policies = ServedPolicies(
            {policy_id: replace(model, meter=self._meter) for policy_id, model in models.items()}
        )
        self._agents = AgentEndpoint(settings.agents, token=os.environ.get(AGENT_TOKEN))
        self.runner = EpisodeRunner(
            self._policies,
            capacity=settings.capacity,
            eval_extra=settings.eval_extra,
            agents=self._agents,
        )
        self._puller = puller
        self._relays = relays
        self.metrics_address = ""
        self._notes = NodeFailureLog()
        self._client: RaasClient | None = None
        self._tasks: TaskStream | None = None
        self._workflows: Mapping[WorkflowId, LoadedWorkflow] = {}
        self._reports = asyncio.Queue[Failure]()
        self._departing = asyncio.Event()
        self._stopping = asyncio.Event()

    def drain(self) -> None:
        """Take nothing new, finish what runs, leave; idempotent."""
        self._departing.set()

    def stop(self) -> None:
        """Leave at once; what is held returns to the run."""
        self._departing.set()
        self._stopping.set()

    def report(self, failure: Failure) -> None:
        """Log what failed beside any rollout, and tell the run; on the event loop."""
        self._reports.put_nowait(self._notes.record(failure))

    def report_from_thread(self, failure: Failure) -> None:
        """Tell the run of what blocks the event loop; blocks.

        Raises:
            AstraflowError: NOT_READY before the node has joined.
            grpc.RpcError: It was not heard.
        """
        if self._client is None:
            raise AstraflowError(Reason.NOT_READY, "the node has not joined yet")
        self._client.session.report_from_thread(failure)

    async def run(self) -> NodeDeparture:
        """Join, work, leave.

        Raises:
            AstraflowError: What the join answers (see RaasClient.join), SESSION_FENCED;
                NOT_READY when the hub could not be reached.
        """
        settings = self._settings
        hooks = MemberHooks(
            load=self._load,
            held=self._held,
            opened=self._reopened,
            directed=self._directed,
        )
        async with dial_pool(
            settings.hub,
            token=settings.token,
            join=self._join_request(),
            hooks=hooks,
            describe=lambda join: replace(join, policies=self._served),
            tls=settings.tls,
            patience_s=settings.patience_s,
        ) as client:
            self._client = client
            try:
                return await self._serve(client)
            except AstraflowError as error:
                if error.reason is not Reason.RUN_ENDED:
                    raise
                log.info("the run has ended")
                return NodeDeparture.STOPPED
            finally:
                # What they keep running is served until it has ended.
                await close_workflows(self._workflows.values())
                await self._agents.close()

    def _join_request(self) -> JoinPool:
        settings, models = self._settings, self._policies.models.values()
        capabilities = {Capability.PIN_VERSION}
        if self._relays is not None:
            capabilities.add(Capability.RELAY)
        if any(model.engine.tells_experts for model in models):
            capabilities.add(Capability.ROUTED_EXPERTS)
        return JoinPool(
            name=settings.name,
            contract=Contract(capabilities=frozenset(capabilities), software=settings.software),
            capacity=settings.capacity,
            policies=self._served,
            codes=settings.codes,
            resources=replace(settings.resources, metrics_address=self.metrics_address),
            region=settings.region,
            relay_endpoint=self._relays.endpoint if self._relays else "",
        )

    @property
    def _served(self) -> tuple[ServedPolicy, ...]:
        """The policies with the versions that are live now."""
        return tuple(
            ServedPolicy(
                policy_id=policy_id,
                version=model.engine.version,
                identity=model.identity,
                max_context_token_count=model.engine.max_context_token_count,
            )
            for policy_id, model in self._policies.models.items()
        )

    async def _serve(self, client: RaasClient) -> NodeDeparture:
        membership: PoolMembership | None = None

        async def join() -> None:
            nonlocal membership
            membership = await client.join()

        await either(join(), self._departing.wait())
        if membership is None:
            # Asked to leave while no hub answered: nothing is held.
            return NodeDeparture.STOPPED
        self._admit(membership.session)
        # On every record from here on; the node's tasks inherit it.
        bind_contextvars(run=membership.run_id, member=membership.session.member_id)
        log.info("joined")
        self._workflows = build_workflows(membership.workflows)
        tasks = self._tasks = client.tasks(
            credit=self._credit, take=self.runner.take, cancel=self.runner.cancel
        )
        payloads = None
        if client.payload_store is not None:
            payloads = PayloadWriter(client.payload_store, patience_s=self._settings.patience_s)
            # One that is not the hub's ends the node here.
            await payloads.check()
        results = PublishRequester(client.rollouts, client.versions, every=self._settings.ask_every)
        updates = [
            WeightUpdater(
                policy_id,
                engine=model.engine,
                gate=self._policies.gates[policy_id],
                puller=self._puller(policy_id),
                versions=client.versions,
                transfer_token=lambda: client.session.transfer_token,
                is_relay=self._relays is not None,
                kinds=self._settings.kinds,
                counters=self.runner.counters,
            ).run()
            for policy_id, model in self._policies.models.items()
        ]
        own = (client.session.run(), client.rollouts.run(), results.run())
        async with beside(*own, self._send_reports(client), *updates) as group:
            self.runner.start(
                group,
                self._workflows,
                results=results,
                give_back=tasks.nack,
                run_time=lambda: client.session.run_clock.now,
                payloads=payloads,
            )
            async with beside(tasks.run()):
                await self._departing.wait()
                tasks.set_credit(TaskCredit(max_outstanding=0))
                departure = await self._finish(client)
        if payloads is not None:
            # The run removes all that is there once its members have left.
            await payloads.close()
        await client.session.end(f"{self._settings.name} leaves: {departure}")
        return departure

    async def _send_reports(self, client: RaasClient) -> None:
        """Tell the run of each report, until cancelled."""
        while True:
            failure = await self._reports.get()
            try:
                await client.session.report(failure)
            except AstraflowError as error:
                # The streams of work end the node where the run is over for it.
                log.warning("the hub did not hear a report", why=error.message)

    async def _finish(self, client: RaasClient) -> NodeDeparture:
        """Finish what runs, unless it is to stop at once."""

        async def finish() -> None:
            await self.runner.idle()
            await client.rollouts.flush()

        self.runner.drain()
        async with asyncio.TaskGroup() as race:
            finished = race.create_task(finish())
            stopped = race.create_task(self._stopping.wait())
            await asyncio.wait({finished, stopped}, return_when=asyncio.FIRST_COMPLETED)
            finished.cancel()
            stopped.cancel()
        if not self._stopping.is_set():
            return NodeDeparture.DRAINED
        self.runner.stop()
        return NodeDeparture.STOPPED

    @property
    def _credit(self) -> TaskCredit:
        capacity, client = self._settings.capacity, self._client
        ahead = headroom(
            capacity=capacity,
            round_trip_s=0.0 if client is None else client.session.run_clock.round_trip_s,
            episode_s=self.runner.times.mean_s,
            task_size=self.runner.times.task_size,
        )
        return TaskCredit(
            max_outstanding=capacity + ahead,
            max_eval_extra=self._settings.eval_extra,
        )

    def _load(self) -> RaasLoad:
        if self._tasks is not None and not self._departing.is_set():
            self._tasks.set_credit(self._credit)
        return self._meter.report(
            (model.engine.load() for model in self._policies.models.values()),
            inflight_count=self.runner.running_count,
            queued_count=self.runner.queued_count,
            capacity=self._settings.capacity,
        )

    def _held(self) -> Held:
        if self._client is None:
            return Held()
        return Held(task_ids=(*self.runner.held, *self._client.rollouts.unacked_results))

    def _admit(self, session: Session) -> None:
        if self._relays is not None:
            self._relays.set_transfer_token(session.transfer_token)

    def _reopened(self, session: Session) -> None:
        self._admit(session)
        self.runner.keep(session.held_task_ids)

    def _directed(self, directive: Directive) -> None:
        log.info("the run asks", directive=directive.kind, why=directive.message)
        match directive.kind:
            case DirectiveKind.DRAIN:
                self.drain()
                if directive.grace is not None:
                    # Leave before the session is ended by the run.
                    grace_s = 0.9 * directive.grace.total_seconds()
                    asyncio.get_running_loop().call_later(grace_s, self.stop)
            case DirectiveKind.STOP:
                self.stop()
            case DirectiveKind.CONTINUE:
                pass
