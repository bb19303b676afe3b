"""Our nodes as one RaaS of an existing Dataflow: what its endpoints call."""

from contextlib import AsyncExitStack
from time import perf_counter, time
from typing import Any, Final, Self

import structlog

from astraflow.client.duplex import beside
from astraflow.client.loop_thread import HostLoop
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId, RunId
from astraflow.core.members import Directive, DirectiveKind
from astraflow.core.tasks import TaskPurpose, VersionRange
from astraflow.gateway.edge.errors import RefusedError
from astraflow.gateway.edge.peers import DialRules
from astraflow.gateway.pool.book import OrderBook
from astraflow.gateway.pool.desk import OrderDesk
from astraflow.gateway.pool.nodes import Node
from astraflow.gateway.pool.orders import Order
from astraflow.gateway.pool.requests import LoadVersion, Submit
from astraflow.gateway.pool.results import item_of
from astraflow.gateway.pool.servicers import pool_servicers
from astraflow.gateway.pool.sessions import NodeSessions
from astraflow.gateway.pool.settings import PoolSettings
from astraflow.gateway.pool.versions import Loaded, PoolVersions
from astraflow.rpc.access import Access
from astraflow.rpc.server import start_server
from astraflow.rpc.tokens import HubTokens

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Prompts of a purpose that are not pulled yet; whoever submits more is told to pull.
_MAX_OPEN: Final = 8192
_GOODBYE_S: Final = 5.0
_DEFAULT: Final = "default"
_TRAIN: Final = TaskPurpose.TRAIN


class DataflowPool:
    """Takes prompts from the Dataflow to nodes, and results back; `async with` serves nodes.

    Attributes:
        settings: What it is.
        book: Workflows that were registered.
        desk: Orders and nodes.
        address: host:port for nodes, once it serves.
    """

    def __init__(self, settings: PoolSettings) -> None:
        """Prepare; nothing is served.

        Raises:
            AstraflowError: CODE_UNKNOWN when a workflow or a scorer is not here.
        """
        self.settings = settings
        self.address = ""
        self.book = OrderBook(settings)
        self.desk = OrderDesk(pins=self._pins)
        self._versions: dict[PolicyId, PoolVersions] = {}
        self._sessions = NodeSessions(
            self.desk,
            run_id=RunId(settings.uid),
            workflows=self.book.specs,
            policy_ids=frozenset(settings.policy_ids),
            is_ours=lambda policy_id, version: version in self._versions[policy_id].labels,
            ttl_s=settings.recipe.hub.session_ttl_s,
            clock=perf_counter,
        )
        self._versions = self._make_versions()
        self._reset_epoch = 0
        self._exits = AsyncExitStack()

    def _make_versions(self) -> dict[PolicyId, PoolVersions]:
        loop, http = HostLoop(), self.settings.recipe.http
        return {
            policy_id: PoolVersions(
                policy_id,
                host=http.host,
                timeout_s=http.transfer_timeout_s,
                transfer_token=self._sessions.transfer_token,
                loop=loop,
                first=int(time()),
                tls=self.settings.tls,
            )
            for policy_id in self.settings.policy_ids
        }

    async def __aenter__(self) -> Self:
        """Serve nodes, with the first weights where there are some."""
        async with AsyncExitStack() as exits:
            for policy_id, versions in self._versions.items():
                exits.push_async_callback(versions.close)
                directory = self.settings.first_model(policy_id)
                if directory is not None:
                    await versions.publish_from(directory)
            await self._listen(exits)
            await exits.enter_async_context(beside(self._sessions.expire()))
            self._exits = exits.pop_all()
        return self

    async def _listen(self, exits: AsyncExitStack) -> None:
        tokens = HubTokens(join=self.settings.token, operator="")
        access = Access(tokens, sessions=self._sessions.tokens, roles=self._sessions.roles)
        servicers = pool_servicers(self._sessions, self.desk, self._versions, access)
        listen, tls = self.settings.listen, self.settings.tls
        server = await start_server(servicers, listen=listen, tls=tls)
        self.address = (await exits.enter_async_context(server)).address

    async def __aexit__(self, *_: object) -> None:
        """Let nodes go; they have some seconds to say goodbye."""
        stop = Directive(kind=DirectiveKind.STOP, message="the pool closes")
        for node in self._nodes:
            node.outbox.put(stop)
        await self.desk.until(lambda: not self._nodes, _GOODBYE_S)
        await self._exits.aclose()

    @property
    def _nodes(self) -> list[Node]:
        return list(self.desk.nodes.values())

    @property
    def _ready_count(self) -> int:
        wanted = set(self.settings.policy_ids)
        return sum(wanted <= node.live.keys() for node in self._nodes)

    @property
    def is_ready(self) -> bool:
        """Whether a node has weights of every policy."""
        return self._ready_count > 0

    @property
    def accelerator_count(self) -> int:
        """Of all nodes."""
        return sum(node.join.resources.accelerator_count for node in self._nodes)

    @property
    def _concurrency(self) -> int:
        """Prompts at once."""
        return sum(node.join.capacity for node in self._nodes) // self.book.sample_count

    def status(self) -> dict[str, Any]:
        """Say how the pool stands; it is ready while a node has weights."""
        return {
            "status": "ready" if self.is_ready else "starting",
            "engine_id": self.settings.uid,
            "backend": "astraflow",
            "models": list(self.settings.policy_ids),
            "message": f"{len(self._nodes)} nodes, {self._ready_count} with weights",
            "max_concurrency": self._concurrency,
            "queued": self.desk.waiting_count(_TRAIN),
            "inflight": self.desk.open_count(_TRAIN),
            "pending_futures": self.desk.finished_count(_TRAIN),
            "workflows": self.book.names,
        }

    def availability(self) -> dict[str, Any]:
        """Say how many more prompts there is room for: what nodes take, and nobody waits for."""
        room = sum(max(0, node.room(_TRAIN)) for node in self._nodes if node.live)
        queued = self.desk.waiting_count(_TRAIN)
        return {
            "max_concurrency": self._concurrency,
            "queued": queued,
            "inflight": self.desk.open_count(_TRAIN),
            "available": max(0, room // self.book.sample_count - queued),
            "adaptive_enabled": False,
        }

    def submit(self, asked: Submit, purpose: TaskPurpose) -> int:
        """Take a prompt; return its number.

        Raises:
            RefusedError: 429 when too much waits; see `OrderBook.order`.
        """
        if self.desk.open_count(purpose) + self.desk.finished_count(purpose) >= _MAX_OPEN:
            raise RefusedError(429, f"{_MAX_OPEN} prompts are open or finished: pull first")
        order = self.book.order(asked, purpose)
        self.desk.submit(order)
        return order.number

    def _pins(self, order: Order) -> dict[PolicyId, VersionRange]:
        """Training samples with what a node has; an evaluation with the newest version alone."""
        if not order.is_eval:
            return dict.fromkeys(order.pattern.sampling, VersionRange())
        newest = {each: self._versions[each].newest for each in order.pattern.sampling}
        return {each: VersionRange(min=at, max=at) for each, at in newest.items()}

    def items(self, orders: list[Order]) -> list[dict[str, Any]]:
        """Return orders as /pull says them."""
        labels = {policy_id: each.labels for policy_id, each in self._versions.items()}
        return [item_of(order, labels, self.settings.policy_ids) for order in orders]

    async def load(self, asked: LoadVersion, *, caller: str | None) -> dict[str, Any]:
        """Bring a trainer's version to all nodes; return as published, also where that failed.

        Args:
            asked: What was asked.
            caller: Host of who asks: it may be dialled.

        Raises:
            RefusedError: 404 for a model that is none.
        """
        policy_id = self._policy(asked.model_id)
        try:
            loaded = await self._load(policy_id, asked, self.settings.dial.also(caller))
        except AstraflowError as error:
            log.warning("a version did not come", version=asked.version, why=str(error))
            return {"ok": False, "reason": str(error)}
        return loaded.to_json(policy_id)

    async def _load(self, policy_id: PolicyId, asked: LoadVersion, dial: DialRules) -> Loaded:
        """Publish a version, and wait until every node has it."""
        versions = self._versions[policy_id]
        loaded = await versions.load(asked.version, asked.sender_endpoint, dial)
        newest, timeout_s = versions.newest or 0, self.settings.recipe.http.transfer_timeout_s

        def late() -> list[str]:
            return [node.join.name for node in self._nodes if node.lacks(policy_id, newest)]

        if not await self.desk.until(lambda: not late(), timeout_s):
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT,
                f"{', '.join(late())} did not load version {loaded.label} in {timeout_s:g} s",
            )
        return loaded

    def _policy(self, model_id: str | None) -> PolicyId:
        known = self.settings.policy_ids
        if model_id in (None, _DEFAULT) and len(known) == 1:
            return known[0]
        if model_id is None or model_id not in known:
            raise RefusedError(404, f"model_id {model_id} is none of {', '.join(known)}")
        return PolicyId(model_id)

    async def reset(self, timeout_s: float) -> dict[str, Any]:
        """Withdraw training: what runs is cancelled, what has finished is dropped."""
        began = perf_counter()
        self._reset_epoch += 1
        cancelled = self.desk.cancel(_TRAIN)
        await self.desk.until(lambda: not self.desk.open_count(_TRAIN), timeout_s)
        return {
            "cancelled": cancelled,
            "stragglers": self.desk.open_count(_TRAIN),
            "dropped_results": self.desk.drop_finished(_TRAIN),
            "sglang_running": sum(node.load.inflight_count for node in self._nodes),
            "ready_for_eval": True,
            "reset_epoch": self._reset_epoch,
            "elapsed": perf_counter() - began,
        }
