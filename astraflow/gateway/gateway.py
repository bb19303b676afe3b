"""The gateway: trainers and RaaS that speak HTTP, and what it asks the run as its operator."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Generic, Self, TypeVar

import structlog
from starlette.exceptions import HTTPException

from astraflow.client.control import ControlClient
from astraflow.client.loop_thread import HostLoop
from astraflow.core.evals import EvalState
from astraflow.core.ids import PolicyId
from astraflow.core.status import RunStatus
from astraflow.gateway.bridge.member import BridgedRaas
from astraflow.gateway.http import RegisterRaas, TrainerReady
from astraflow.gateway.receiving import SenderCopy
from astraflow.gateway.sending import FlatVersions, Pusher
from astraflow.gateway.settings import GatewaySettings, policy_of
from astraflow.gateway.trainer import BridgedTrainer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Gateway:
    """What the endpoints call; `async with` serves, and everybody leaves at its end."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.address = ""
        self._trainers: dict[PolicyId, BridgedTrainer] = {}
        self._lives: dict[PolicyId, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._joining = asyncio.Lock()
        self._exits, self._closing = AsyncExitStack(), AsyncExitStack()
        self._control: ControlClient | None = None
        self._run = SharedQuestion(lambda: self.control.get_run())  # noqa: PLW0108 - it comes later
        self._raas: dict[str, BridgedRaas] = {}
        self._raas_lives: dict[str, asyncio.Task[None]] = {}
        self._flat_versions: dict[PolicyId, FlatVersions] = {}

    async def __aenter__(self) -> Self:
        self._loop = HostLoop()
        await self._exits.enter_async_context(self._group)
        token = self.settings.operator_token
        if token is not None:
            control = ControlClient(self.settings.hub, token=token, tls=self.settings.tls)
            self._control = await self._exits.enter_async_context(control)
        for policy_id in self.settings.policy_ids:
            self._flat_versions[policy_id] = FlatVersions(policy_id, tls=self.settings.tls)
            self._closing.push_async_callback(self._flat_versions[policy_id].close)
        timeout_s = self.settings.recipe.http.transfer_timeout_s
        self._pusher = await self._closing.enter_async_context(Pusher(timeout_s=timeout_s))
        return self

    async def __aexit__(self, *raised: object) -> None:
        for raas in self._raas.values():
            raas.leave()
        for trainer in self._trainers.values():
            trainer.leave()
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
        """Return how the run stands; many who ask at once cost one call."""
        return await self._run.answer()

    async def ready(self, ready: TrainerReady, *, caller: str | None) -> None:
        """Let a trainer join; who had its policy before leaves first. The caller may be dialled."""
        policy_id, settings = policy_of(ready.model_id, self.settings.policy_ids), self.settings
        # Sequences of a batch in which every rollout has one trajectory.
        groups = settings.recipe.policies[policy_id].trainer.groups_per_batch
        row_count = groups * settings.recipe.rollouts.group_size
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
                if policy_id in self._trainers:
                    self._trainers.pop(policy_id).leave()
                    await asyncio.wait([self._lives.pop(policy_id)])
                # From here on the copy is the trainer's.
                undo.pop_all()
                trainer = self._trainers[policy_id] = BridgedTrainer(
                    policy_id,
                    settings,
                    copy,
                    recovered=ready.recovered_version,
                    loop=self._loop,
                )
                self._lives[policy_id] = self._group.create_task(trainer.live())
        await trainer.ready()

    def trainer(self, model_id: str | None) -> BridgedTrainer:
        """Return the trainer of a policy."""
        policy_id = policy_of(model_id, self.settings.policy_ids)
        if policy_id not in self._trainers:
            raise HTTPException(409, f"no trainer of {policy_id} is here: POST /ready first")
        return self._trainers[policy_id]

    async def evaluate(self, trainer: BridgedTrainer, label: int) -> dict[str, float] | None:
        """Measure a trainer's version on every suite that has its policy; training goes on.

        Returns:
            eval-avg/SET/avg@k (in percent), eval-avg/SET/mean_reward and eval-pass/SET/pass@k (in
            percent); None: the recipe has no such suite.

        Raises:
            HTTPException: 501 without an operator token.
            AstraflowError: VERSION_EVICTED, VERSION_NOT_SERVED, RUN_ENDED.
        """
        policy_id, version, evals = trainer.policy_id, label + trainer.offset, self.control.evals
        suites = [each for each in await evals.suites() if policy_id in each.policy_ids]
        asked = [
            await evals.create(
                each.suite,
                versions={policy_id: version},
                request_id=f"gateway-{policy_id}-{version}-{each.suite}",
            )
            for each in suites
        ]
        found: dict[str, float] = {}
        for run in asked:
            async for seen in evals.watch(run.eval_run_id):
                run = seen  # noqa: PLW2901 - as it is now
            if run.state is not EvalState.SUCCEEDED:
                log.warning(
                    "an evaluation did not succeed",
                    suite=run.suite,
                    state=run.state,
                    why=run.failure.message if run.failure else "",
                )
                continue
            for each in run.results:
                name, k = each.data_set, each.repeats
                found[f"eval-avg/{name}/avg@{k}"] = 100.0 * each.avg_at_k
                found[f"eval-avg/{name}/mean_reward"] = each.mean_reward
                if k in each.pass_at_k:
                    found[f"eval-pass/{name}/pass@{k}"] = 100.0 * each.pass_at_k[k]
        return found if suites else None

    async def register_raas(self, register: RegisterRaas, *, caller: str | None) -> int:
        """Let an HTTP RaaS join; one of the same uid or address leaves first.

        A RaaS hands out each result once: two who call it would lose each other's. The caller may
        be dialled.
        """
        if not self.settings.rules.reads_pickles:
            raise HTTPException(409, "an HTTP RaaS answers pickles: give --legacy-pickle")
        async with self._joining:
            settings = replace(self.settings, dial=self.settings.dial.also(caller))
            raas = BridgedRaas(
                register, settings, flat_versions=self._flat_versions, pusher=self._pusher
            )
            for uid, other in tuple(self._raas.items()):
                if uid == register.uid or other.url == raas.url:
                    await self.deregister_raas(uid)
            self._raas[register.uid] = raas
            life = self._raas_lives[register.uid] = self._group.create_task(raas.live())

            def forget(_: object) -> None:
                """Forget one that has left by itself."""
                if self._raas.get(register.uid) is raas:
                    del self._raas[register.uid], self._raas_lives[register.uid]

            life.add_done_callback(forget)
        await asyncio.shield(raas.joined)
        return len(self._raas)

    async def deregister_raas(self, uid: str, *, shutdown: bool = False) -> int:
        """Let an HTTP RaaS leave; one that is not there has left already."""
        if uid in self._raas:
            self._raas.pop(uid).leave(shutdown=shutdown)
            await asyncio.wait([self._raas_lives.pop(uid)])
        return len(self._raas)


Answer = TypeVar("Answer")


class SharedQuestion(Generic[Answer]):
    """Asks while it is not asked already; who comes meanwhile shares the next answer.

    Nobody gets an answer that was asked for before the caller came, so everybody sees what went
    before.
    """

    def __init__(self, ask: Callable[[], Awaitable[Answer]]) -> None:
        self._ask = ask
        self._asked: asyncio.Future[Answer] | None = None
        self._next: asyncio.Future[Answer] | None = None

    async def answer(self) -> Answer:
        """Return an answer that is asked for from now on."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._after(self._asked))
            # All who share it may have gone.
            self._next.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        return await asyncio.shield(self._next)

    async def _after(self, asked: "asyncio.Future[Answer] | None") -> Answer:
        if asked is not None:
            await asyncio.wait([asked])
        self._asked, self._next = self._next, None
        return await self._ask()
