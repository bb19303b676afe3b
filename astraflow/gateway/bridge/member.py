"""An HTTP RaaS as a member of the pool, from its registration until it leaves."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from time import monotonic
from typing import Any, cast

import structlog

from astraflow import __version__
from astraflow.client.raas import RaasClient, dial_pool
from astraflow.client.session import Held, MemberHooks
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import (
    Contract,
    Directive,
    DirectiveKind,
    JoinPool,
    PoolMembership,
    RaasLoad,
    Resources,
    ServedPolicy,
)
from astraflow.core.tasks import RegisteredCode, TaskCredit
from astraflow.gateway.bridge.calls import RaasCalls
from astraflow.gateway.bridge.work import BridgeWork, VersionSync
from astraflow.gateway.http import RegisterRaas, serve_app
from astraflow.gateway.sending import FlatVersions, Pusher, Sender, sender_app
from astraflow.gateway.settings import GatewaySettings
from astraflow.rpc.concurrency import beside

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# The published service waits so long for a RaaS that loads its engines.
_READY_S = 120.0
_POLL_S = 0.5
# The published default of what it takes of evaluations, beside training.
_EVAL_SAMPLES = 128
# The published default; an HTTP RaaS does not say what its engines take.
_CONTEXT = 32768


class BridgedRaas:
    """Joins for an HTTP RaaS, and leaves when it is gone.

    Attributes:
        url: Where it is called.
        joined: Done once it is in the pool, or with why it is not.
    """

    def __init__(
        self,
        register: RegisterRaas,
        settings: GatewaySettings,
        *,
        flat_versions: Mapping[PolicyId, FlatVersions],
        pusher: Pusher,
    ) -> None:
        self.url = register.raas_url.rstrip("/")
        self.joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._register = register
        self._settings = settings
        self._flat_versions = flat_versions
        self._pusher = pusher
        self._leaving = asyncio.Event()
        self._draining = asyncio.Event()
        self._work: BridgeWork | None = None
        self._ends_it = False

    def leave(self, *, shutdown: bool = False) -> None:
        """Leave the pool, and end the RaaS where that is said; what is held is issued again."""
        self._ends_it = shutdown
        self._leaving.set()

    async def live(self) -> None:
        uid = self._register.uid
        try:
            async with AsyncExitStack() as stack:
                await self._live(stack)
        except AstraflowError as error:
            log.warning("an HTTP RaaS has left", uid=uid, why=str(error))
            self._refuse(error)
        except Exception as error:
            log.exception("an HTTP RaaS does not answer as it should", uid=uid)
            why = f"{uid} does not answer as it should: {type(error).__name__}"
            self._refuse(AstraflowError(Reason.ENVIRONMENT_FAILED, why))
        finally:
            self._refuse(AstraflowError(Reason.MEMBER_LOST, f"{uid} left before it had joined"))

    def _refuse(self, error: AstraflowError) -> None:
        """Tell who waits for it to join, if anybody does."""
        if not self.joined.done():
            self.joined.set_exception(error)
            # Nobody may be there any more to look at it.
            self.joined.exception()

    async def _live(self, stack: AsyncExitStack) -> None:
        settings = self._settings
        calls = await stack.enter_async_context(
            RaasCalls(
                self._register.raas_url,
                load_timeout_s=settings.recipe.http.transfer_timeout_s,
                dial=self._settings.dial,
            )
        )
        status = await self._ready(calls)
        syncs = {
            policy_id: await self._version_sync(stack, policy_id, status)
            for policy_id in settings.policy_ids
        }
        client = await stack.enter_async_context(self._dial(status, syncs))
        membership = await client.join()
        try:
            await self._serve(client, membership, calls, syncs)
        finally:
            await client.session.end(f"{self._register.uid} leaves")
        if self._ends_it:
            await calls.shutdown()

    async def _serve(
        self,
        client: RaasClient,
        membership: PoolMembership,
        calls: RaasCalls,
        syncs: Mapping[PolicyId, VersionSync],
    ) -> None:
        """Work until it leaves."""
        async with beside(client.session.run(), client.rollouts.run()):
            work = BridgeWork(calls, client, syncs, membership.workflows)
            self._work = work
            tasks = client.tasks(
                credit=TaskCredit(max_outstanding=0), take=work.take, cancel=work.cancel
            )
            work.stream = tasks
            running = [sync.run(client, calls) for sync in syncs.values()]
            async with beside(
                work.run(),
                tasks.run(),
                self._follow_capacity(calls, work),
                self._drained(work, client),
                *running,
            ):
                self.joined.set_result(None)
                await self._leaving.wait()

    async def _ready(self, calls: RaasCalls) -> Mapping[str, Any]:
        """Wait until the RaaS has loaded its engines."""
        deadline = monotonic() + _READY_S
        while True:
            status = await calls.status()
            if status.get("status") in ("ready", "idle"):
                return status
            if monotonic() > deadline:
                why = f"{calls.url} is not ready after {_READY_S:g} s"
                raise AstraflowError(Reason.NOT_READY, why)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), _POLL_S)
                why = f"{self._register.uid} left before it had joined"
                raise AstraflowError(Reason.MEMBER_LOST, why)

    async def _version_sync(
        self, stack: AsyncExitStack, policy_id: PolicyId, status: Mapping[str, Any]
    ) -> VersionSync:
        sender = Sender(policy_id)
        host, rules = self._settings.recipe.http.host, self._settings.rules
        app = sender_app(sender, self._pusher, rules, self._settings.dial)
        endpoint = await stack.enter_async_context(serve_app(app, host=host, rules=rules))
        models = cast("list[Any]", status.get("models") or [])
        return VersionSync(
            policy_id,
            model_id=policy_id if policy_id in models or len(models) != 1 else str(models[0]),
            flat_versions=self._flat_versions[policy_id],
            sender=sender,
            endpoint=endpoint,
        )

    def _dial(
        self, status: Mapping[str, Any], syncs: Mapping[PolicyId, VersionSync]
    ) -> AbstractAsyncContextManager[RaasClient]:
        settings = self._settings
        prompts = max(1, int(status.get("max_concurrency") or 1))
        workflows = settings.recipe.workflows.values()
        names = [name for each in workflows for name in (each.name, each.scorer)]
        join = JoinPool(
            name=self._register.uid,
            contract=Contract(software=f"astraflow-gateway/{__version__}"),
            capacity=prompts * settings.recipe.rollouts.group_size,
            policies=tuple(
                ServedPolicy(policy_id=policy_id, max_context_token_count=_CONTEXT)
                for policy_id in syncs
            ),
            # It is taken to have them: nobody compares their sources.
            codes=tuple(RegisteredCode(name=name) for name in dict.fromkeys(filter(None, names))),
            resources=Resources(accelerator_count=self._register.gpu_count or 0),
        )
        hooks = MemberHooks(
            load=lambda: RaasLoad(inflight_count=self._work.sample_count if self._work else 0),
            held=lambda: Held(task_ids=self._work.held if self._work else ()),
            opened=lambda session: self._work and self._work.keep(session.held_task_ids),
            directed=self._directed,
        )
        return dial_pool(
            settings.hub,
            token=settings.token,
            join=join,
            hooks=hooks,
            tls=settings.tls,
            patience_s=settings.recipe.hub.patience_s,
        )

    async def _follow_capacity(self, calls: RaasCalls, work: BridgeWork) -> None:
        """Follow what the RaaS takes; one that cannot be reached for long has gone."""
        seen = monotonic()
        while True:
            try:
                available = await calls.available()
                seen = monotonic()
            except AstraflowError:
                available = 0
                if monotonic() - seen > self._settings.recipe.hub.patience_s:
                    raise
            credit = TaskCredit(max_outstanding=0)
            if not self._draining.is_set():
                room = available * self._settings.recipe.rollouts.group_size
                # Evaluations have a room of their own.
                credit = TaskCredit(
                    max_outstanding=work.train_sample_count + room,
                    max_eval_outstanding=0,
                    max_eval_extra=_EVAL_SAMPLES,
                )
            if work.stream is not None:
                work.stream.set_credit(credit)
            await asyncio.sleep(_POLL_S / 2)

    async def _drained(self, work: BridgeWork, client: RaasClient) -> None:
        """Leave once it drains and what it holds has ended."""
        await self._draining.wait()
        await work.idle.wait()
        await client.rollouts.flush()
        self._leaving.set()

    def _directed(self, directive: Directive) -> None:
        match directive.kind:
            case DirectiveKind.DRAIN:
                self._draining.set()
            case DirectiveKind.STOP:
                self._leaving.set()
            case DirectiveKind.CONTINUE:
                pass
