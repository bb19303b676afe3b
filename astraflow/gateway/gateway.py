"""The gateway: seats of trainers, and what it asks the run as its operator."""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

import structlog
from starlette.exceptions import HTTPException

from astraflow.client.control import ControlClient
from astraflow.client.loop_thread import HostLoop
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.evals import EvalResult, EvalRun, EvalState
from astraflow.core.ids import PolicyId
from astraflow.core.status import RunStatus
from astraflow.gateway.bridge.member import BridgedRaas
from astraflow.gateway.edge.shared import SharedQuestion
from astraflow.gateway.legacy.receiving import SenderCopy
from astraflow.gateway.legacy.sending import Pusher, WeightDesk
from astraflow.gateway.requests import Ready, RegisterRaas
from astraflow.gateway.seats.seat import TrainerSeat
from astraflow.gateway.settings import GatewaySettings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_DEFAULT = "default"


class Gateway:
    """What the endpoints call; `async with` serves, and everybody leaves at its end.

    Attributes:
        settings: What it is.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        """Prepare; nothing is dialled."""
        self.settings = settings
        self._seats: dict[PolicyId, TrainerSeat] = {}
        self._lives: dict[PolicyId, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._joining = asyncio.Lock()
        self._exits, self._closing = AsyncExitStack(), AsyncExitStack()
        self._control: ControlClient | None = None
        self._run = SharedQuestion(self._get_run)
        self._raas: dict[str, BridgedRaas] = {}
        self._raas_lives: dict[str, asyncio.Task[None]] = {}
        self._desks: dict[PolicyId, WeightDesk] = {}

    async def __aenter__(self) -> Self:
        """Begin."""
        self._loop = HostLoop()
        await self._exits.enter_async_context(self._group)
        token = self.settings.operator_token
        if token is not None:
            control = ControlClient(self.settings.hub, token=token, tls=self.settings.tls)
            self._control = await self._exits.enter_async_context(control)
        for policy_id in self.settings.policy_ids:
            self._desks[policy_id] = WeightDesk(policy_id, tls=self.settings.tls)
            self._closing.push_async_callback(self._desks[policy_id].close)
        timeout_s = self.settings.recipe.http.transfer_timeout_s
        self._pusher = await self._closing.enter_async_context(Pusher(timeout_s=timeout_s))
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Let everybody leave."""
        for raas in self._raas.values():
            raas.leave()
        for seat in self._seats.values():
            seat.leave()
        await self._exits.aclose()
        await self._closing.aclose()

    @property
    def control(self) -> ControlClient:
        """The run, as its operator sees it.

        Raises:
            HTTPException: 501 without an operator token.
        """
        if self._control is None:
            raise HTTPException(501, "the gateway has no operator token; give --operator-token")
        return self._control

    async def run(self) -> RunStatus:
        """Return how the run stands; many who ask at once cost one call.

        Raises:
            HTTPException: 501 without an operator token.
        """
        return await self._run.answer()

    async def _get_run(self) -> RunStatus:
        return await self.control.get_run()

    async def ready(self, ready: Ready, *, caller: str | None) -> None:
        """Let a trainer take its seat; one that was there before leaves first.

        Args:
            ready: What it says.
            caller: Its host, which may be dialled.

        Raises:
            HTTPException: 422 without a sender, 409 for another batch size.
            AstraflowError: What its sender and the run answer.
        """
        policy_id, settings = self._policy(ready.model_id), self.settings
        row_count = settings.row_count(policy_id)
        if ready.sender_endpoint is None:
            raise HTTPException(422, "sender_endpoint is missing: weights are fetched from there")
        if ready.train_batch_size not in (None, row_count):
            raise HTTPException(
                409,
                f"the run makes batches of {row_count} sequences, the trainer wants "
                f"{ready.train_batch_size}; set policies.{policy_id}.trainer."
                "groups_per_batch or rollouts.group_size of the recipe",
            )
        async with AsyncExitStack() as undo:
            # Nobody waits for a sender that does not answer, and nobody leaves for it.
            copy = await SenderCopy.of(
                ready.sender_endpoint,
                host=settings.recipe.http.host,
                timeout_s=settings.recipe.http.transfer_timeout_s,
                dial=settings.dial.also(caller),
            )
            undo.push_async_callback(copy.close)
            async with self._joining:
                await self._vacate(policy_id)
                # From here on the copy is the seat's.
                undo.pop_all()
                seat = self._seats[policy_id] = TrainerSeat(
                    policy_id,
                    settings,
                    copy,
                    recovered=ready.recovered_version,
                    loop=self._loop,
                )
                self._lives[policy_id] = self._group.create_task(seat.live())
        await seat.ready()

    def seat(self, model_id: str | None) -> TrainerSeat:
        """Return the seat of a policy.

        Raises:
            HTTPException: 409 before /ready.
        """
        policy_id = self._policy(model_id)
        if policy_id not in self._seats:
            raise HTTPException(409, f"no trainer of {policy_id} is here: POST /ready first")
        return self._seats[policy_id]

    async def evaluate(self, seat: TrainerSeat, label: int) -> dict[str, float] | None:
        """Measure a trainer's version on every suite that has its policy; training goes on.

        Returns:
            eval-avg/SET/avg@k (in percent), eval-avg/SET/mean_reward and eval-pass/SET/pass@k (in
            percent); None: the recipe has no such suite.

        Raises:
            HTTPException: 501 without an operator token.
            AstraflowError: VERSION_EVICTED, VERSION_NOT_SERVED, RUN_ENDED.
        """
        policy_id, version, evals = seat.policy_id, label + seat.offset, self.control.evals
        suites = [each for each in await evals.suites() if policy_id in each.policy_ids]
        asked = [
            await evals.create(
                each.suite,
                versions={policy_id: version},
                request_id=f"gateway-{policy_id}-{version}-{each.suite}",
            )
            for each in suites
        ]
        ended = [await self._ended(each) for each in asked]
        return _numbers(result for each in ended for result in each.results) if suites else None

    async def _ended(self, run: EvalRun) -> EvalRun:
        async for seen in self.control.evals.watch(run.eval_run_id):
            run = seen
        if run.state is not EvalState.SUCCEEDED:
            log.warning(
                "an evaluation did not succeed",
                suite=run.suite,
                state=run.state,
                why=run.failure.message if run.failure else "",
            )
        return run

    async def register_raas(self, register: RegisterRaas, *, caller: str | None) -> int:
        """Let an HTTP RaaS join the pool; one of the same uid leaves first.

        Args:
            register: What it says.
            caller: Its host, which may be dialled.

        Returns:
            How many are in the pool through this gateway.

        Raises:
            HTTPException: 409 where pickles are not read: all that it answers is pickled.
            AstraflowError: What the RaaS and the run answer.
        """
        if not self.settings.rules.reads_pickles:
            raise HTTPException(409, "an HTTP RaaS answers pickles: give --legacy-pickle")
        async with self._joining:
            await self.deregister_raas(register.uid)
            settings = replace(self.settings, dial=self.settings.dial.also(caller))
            raas = BridgedRaas(register, settings, desks=self._desks, pusher=self._pusher)
            self._raas[register.uid] = raas
            life = self._raas_lives[register.uid] = self._group.create_task(raas.live())
            life.add_done_callback(lambda _: self._forget(register.uid, raas))
        await asyncio.shield(raas.joined)
        return len(self._raas)

    async def deregister_raas(self, uid: str, *, shutdown: bool = False) -> int:
        """Let an HTTP RaaS leave; one that is not there has left already."""
        if uid in self._raas:
            self._raas.pop(uid).leave(shutdown=shutdown)
            await asyncio.wait([self._raas_lives.pop(uid)])
        return len(self._raas)

    def _forget(self, uid: str, raas: BridgedRaas) -> None:
        """Forget a RaaS that has left by itself."""
        if self._raas.get(uid) is raas:
            del self._raas[uid], self._raas_lives[uid]

    async def _vacate(self, policy_id: PolicyId) -> None:
        """Let who sat there leave."""
        if policy_id in self._seats:
            self._seats.pop(policy_id).leave()
            await asyncio.wait([self._lives.pop(policy_id)])

    def _policy(self, model_id: str | None) -> PolicyId:
        known = self.settings.policy_ids
        if model_id in (None, _DEFAULT) and len(known) == 1:
            return known[0]
        if model_id is None or model_id not in known:
            raise AstraflowError(
                Reason.POLICY_UNKNOWN, f"model_id {model_id} is none of {', '.join(known)}"
            )
        return PolicyId(model_id)


def _numbers(results: Iterable[EvalResult]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in results:
        name, k = each.data_set, each.repeats
        found[f"eval-avg/{name}/avg@{k}"] = 100.0 * each.avg_at_k
        found[f"eval-avg/{name}/mean_reward"] = each.mean_reward
        if k in each.pass_at_k:
            found[f"eval-pass/{name}/pass@{k}"] = 100.0 * each.pass_at_k[k]
    return found
