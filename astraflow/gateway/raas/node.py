"""A node that a Dataflow drives: what its endpoints call."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Self
from uuid import uuid4

import structlog
from starlette.exceptions import HTTPException

from astraflow.config.recipe import Recipe
from astraflow.core.errors import AstraflowError, Failure
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import RolloutTask, TaskPurpose, VersionRange
from astraflow.gateway.http import BodyRules, LoadVersion
from astraflow.gateway.raas.orders import Order, OrderQueue, item_of
from astraflow.gateway.raas.weights import SenderWeights
from astraflow.gateway.raas.workflows import SubmitPrompt, WorkflowRegistry
from astraflow.gateway.settings import policy_of
from astraflow.raas.agents.endpoint import AGENT_TOKEN, AgentEndpoint
from astraflow.raas.failures import NodeFailureLog
from astraflow.raas.policies import ServedModel, ServedPolicies
from astraflow.raas.runner import EpisodeRunner
from astraflow.rpc.concurrency import beside
from astraflow.rpc.peers import DialRules
from astraflow.workflows.building import build_workflows, close_workflows

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# Prompts of a purpose that are not pulled yet; whoever submits more is told to pull.
_MAX_OPEN: Final = 8192
_TRAIN: Final = TaskPurpose.TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class RaasSettings:
    """What the node is."""

    recipe: Recipe
    uid: str = field(default_factory=lambda: f"raas-{uuid4().hex[:6]}")
    models: Mapping[PolicyId, Path] = field(default_factory=dict[PolicyId, Path])
    rules: BodyRules = field(default_factory=BodyRules)
    dial: DialRules = field(default_factory=DialRules)
    http_token: str = field(default="", repr=False)


class DataflowNode:
    """Takes prompts of a Dataflow, and weights of its trainers; `async with` starts it."""

    def __init__(self, settings: RaasSettings, models: Mapping[PolicyId, ServedModel]) -> None:
        """Take the engine and tokenizer of each policy; the engines stay the caller's."""
        recipe = settings.recipe
        self.settings = settings
        self.address, self.ended = "", asyncio.Event()
        self.book = WorkflowRegistry(recipe, settings.uid)
        self._policies = ServedPolicies(models)
        self._agents = AgentEndpoint(recipe.raas.agents, token=os.environ.get(AGENT_TOKEN))
        self.runner = EpisodeRunner(
            self._policies,
            capacity=recipe.raas.capacity,
            eval_extra=recipe.raas.eval_place_count,
            agents=self._agents,
        )
        self.orders = OrderQueue(
            self.runner,
            pins=self._pins,
            capacity=recipe.raas.capacity,
            max_attempts=recipe.rollouts.max_attempts,
        )
        self._weights = {
            policy_id: SenderWeights(
                policy_id,
                engine=model.engine,
                gate=self._policies.gates[policy_id],
                host=recipe.http.host,
                timeout_s=recipe.http.transfer_timeout_s,
            )
            for policy_id, model in models.items()
        }
        self._policy_ids = tuple(self._weights)
        self._capacity = recipe.raas.capacity
        self._notes = NodeFailureLog()
        self._group = asyncio.TaskGroup()
        self._exits = AsyncExitStack()
        self._loads: set[asyncio.Task[dict[str, Any]]] = set()
        self._reset_epoch = 0

    async def __aenter__(self) -> Self:
        """Begin with the first weights."""
        async with AsyncExitStack() as exits:
            for policy_id, weights in self._weights.items():
                exits.push_async_callback(weights.close)
                await weights.begin(self.settings.models[policy_id])
            loaded = build_workflows(self.book.specs)
            exits.push_async_callback(self._agents.close)
            exits.push_async_callback(close_workflows, loaded.values())
            following = (gate.follow() for gate in self._policies.gates.values())
            await exits.enter_async_context(beside(*following))
            await exits.enter_async_context(self._group)
            self.runner.start(
                self._group, loaded, results=self.orders, give_back=self.orders.give_back
            )

            def stop() -> None:
                self.runner.stop()
                for loading in self._loads:
                    loading.cancel()

            exits.callback(stop)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    def report(self, failure: Failure) -> None:
        """Log what failed beside any rollout."""
        self._notes.record(failure)

    def status(self) -> dict[str, Any]:
        """Say how the node stands; it serves once it has weights, and so is ready."""
        return {
            "status": "ready",
            "engine_id": self.settings.uid,
            "backend": "astraflow",
            "models": list(self._policy_ids),
            "message": "",
            "max_concurrency": self._capacity // self.book.sample_count,
            "queued": self.orders.waiting_count(_TRAIN),
            "inflight": self.orders.open_count(_TRAIN),
            "pending_futures": self.orders.finished_count(_TRAIN),
            "workflows": self.book.names,
        }

    def availability(self) -> dict[str, Any]:
        """Say for how many more prompts there is room."""
        queued, count = self.orders.waiting_count(_TRAIN), self.book.sample_count
        return {
            "max_concurrency": self._capacity // count,
            "queued": queued,
            "inflight": self.orders.open_count(_TRAIN),
            "available": max(0, self.orders.free_count // count - queued),
            "adaptive_enabled": False,
        }

    def submit(self, asked: SubmitPrompt, purpose: TaskPurpose) -> int:
        """Take a prompt; return its number."""
        if self.orders.open_count(purpose) + self.orders.finished_count(purpose) >= _MAX_OPEN:
            raise HTTPException(429, f"{_MAX_OPEN} prompts are open or finished: pull first")
        order = self.book.order(asked, purpose)
        self.orders.submit(order)
        return order.number

    def _pins(self, task: RolloutTask) -> dict[PolicyId, VersionRange]:
        """Training samples with what is live; an evaluation with the newest version alone."""
        if task.purpose is _TRAIN:
            return dict.fromkeys(task.sampling, VersionRange())
        versions = {each: self._policies.models[each].engine.version for each in task.sampling}
        return {each: VersionRange(min=live, max=live) for each, live in versions.items()}

    def items(self, orders: list[Order]) -> list[dict[str, Any]]:
        """Return orders as /pull says them."""
        labels = {policy_id: each.labels for policy_id, each in self._weights.items()}
        return [item_of(order, labels, self._policy_ids) for order in orders]

    async def load(self, asked: LoadVersion, *, caller: str | None) -> dict[str, Any]:
        """Bring a trainer's version to the engine; return as published, also where that failed."""
        weights = self._weights[policy_of(asked.model_id, self._policy_ids)]
        timeout_s = self.settings.recipe.http.transfer_timeout_s

        async def loaded() -> dict[str, Any]:
            dial = self.settings.dial.also(caller)
            try:
                return await weights.load(asked.version, asked.sender_endpoint, dial)
            except AstraflowError as error:
                log.warning("a version did not come", version=asked.version, why=str(error))
                return {"ok": False, "reason": str(error)}

        # A swap is not broken off where the caller has gone, or has waited for too long.
        loading = self._group.create_task(loaded())
        self._loads.add(loading)
        loading.add_done_callback(self._loads.discard)
        await asyncio.wait({loading}, timeout=timeout_s)
        if loading.done() and not loading.cancelled():
            return loading.result()
        why = "the node ends" if loading.done() else f"it takes more than {timeout_s:g} s"
        return {"ok": False, "reason": f"version {asked.version} is not live: {why}"}

    async def reset(self, timeout_s: float) -> dict[str, Any]:
        """Withdraw training: what runs is cancelled, what has finished is dropped."""
        began = perf_counter()
        self._reset_epoch += 1
        cancelled = self.orders.cancel(_TRAIN)
        await self.orders.until(lambda: not self.orders.open_count(_TRAIN), timeout_s)
        return {
            "cancelled": cancelled,
            "stragglers": self.orders.open_count(_TRAIN),
            "dropped_results": self.orders.drop_finished(_TRAIN),
            "sglang_running": self.runner.running_count,
            "ready_for_eval": True,
            "reset_epoch": self._reset_epoch,
            "elapsed": perf_counter() - began,
        }
