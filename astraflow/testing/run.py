"""A run in this process and on this event loop: real sockets, real hub, real nodes."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from astraflow.client.control import ControlClient
from astraflow.client.loop_thread import HostLoop, LoopThread
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import Clock, ManualClock
from astraflow.core.errors import AstraflowError
from astraflow.core.events import MemberKeptAlive, RunStopped, Ticked
from astraflow.core.ids import PolicyId
from astraflow.core.status import LedgerAccount, RolloutRecord, RunStatus, StopMode
from astraflow.core.versions import SourceKind
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.server import serve_hub
from astraflow.raas.policies import ServedModel
from astraflow.rpc.access import HubTokens
from astraflow.rpc.concurrency import in_own_thread
from astraflow.testing.engine import CharTokenizer, SmallEngine
from astraflow.testing.line import Line
from astraflow.testing.nodes import LiveNode, make_node
from astraflow.testing.trainer import Trained, train_counter
from astraflow.weights.serve.server import RelayServer

JOIN_TOKEN = "join"  # noqa: S105 - guards a test
OPERATOR_TOKEN = "operator"  # noqa: S105

# A thread cannot be cancelled: it ends with the run, or when its client gives the hub up.
_THREAD_GRACE_S = 40.0

Result = TypeVar("Result")


@dataclass(kw_only=True, eq=False)
class LiveRun:
    """A hub that serves, and the means to bring members to it.

    Attributes:
        recipe: Of the run.
        hub: The hub itself.
        address: Where it is dialled.
        run_dir: What it leaves.
        serving: Done when the run is over and its members are gone.
        loop: For trainers in threads to share.
        nodes: That were added, by name.
    """

    recipe: Recipe
    hub: Hub
    address: str
    run_dir: RunDir
    serving: asyncio.Task[RunStatus]
    loop: LoopThread = field(init=False, default_factory=HostLoop)
    nodes: dict[str, LiveNode] = field(init=False, default_factory=dict[str, LiveNode])
    join_token: ClassVar[str] = JOIN_TOKEN
    operator_token: ClassVar[str] = OPERATOR_TOKEN
    _group: asyncio.TaskGroup
    _exits: AsyncExitStack
    _clock: Clock | None
    _threads: list[asyncio.Task[Any]] = field(init=False, default_factory=list[asyncio.Task[Any]])

    async def add_node(
        self,
        name: str = "",
        *,
        answer: Callable[[str], str] | None = None,
        alphabet: str | None = None,
        capacity: int = 16,
        eval_extra: int = 0,
        relays: RelayServer | None = None,
        kinds: frozenset[SourceKind] | None = None,
        token_s: float = 0.0,
        round_trip_s: float = 0.0,
    ) -> LiveNode:
        """Let a node join; every policy gets a small engine.

        Args:
            name: Unique in the pool; empty: raas-1, raas-2 ...
            answer: See SmallEngine.
            alphabet: Letters that the engines know; None: printable ASCII.
            capacity: Rollouts that it runs at once.
            eval_extra: Rollouts of evaluations beyond that.
            relays: Started; serves what the node pulls. None: nobody does.
            kinds: Of the sources that it pulls weights from; None: all.
            token_s: Seconds per token of its engines.
            round_trip_s: Of its way to the hub.
        """
        name = name or f"raas-{len(self.nodes) + 1}"
        tokenizer = CharTokenizer() if alphabet is None else CharTokenizer(alphabet)
        engines = {
            policy: SmallEngine(tokenizer, answer=answer, token_s=token_s)
            for policy in self.recipe.policies
        }
        line = await self.open_line()
        line.stretch(round_trip_s)
        node = make_node(
            self.recipe,
            hub=line.address,
            token=self.join_token,
            name=name,
            capacity=capacity,
            eval_extra=eval_extra,
            models={
                policy: ServedModel(engine=engine, tokenizer=tokenizer)
                for policy, engine in engines.items()
            },
            relays=relays,
            kinds=kinds,
        )
        left = self._group.create_task(node.run())
        live = LiveNode(name=name, node=node, engines=engines, line=line, left=left)
        self.nodes[name] = live
        return live

    def add_trainer(
        self,
        policy_id: str | None = None,
        *,
        line: Line | None = None,
        store: str | None = None,
        step_s: float = 0.0,
    ) -> asyncio.Task[Trained]:
        """Let a trainer that counts its steps join; see `train_counter`.

        Args:
            policy_id: None: the first policy.
            line: Its way to the hub; None: straight.
            store: URL of an object store to which versions also go; None: to none.
            step_s: Seconds that a step takes.
        """
        policy_id = policy_id or next(iter(self.recipe.policies))
        settings = self.recipe.policies[policy_id].trainer
        return self.add_thread(
            partial(
                train_counter,
                self.address if line is None else line.address,
                token=self.join_token,
                policy_id=policy_id,
                groups_per_batch=settings.groups_per_batch,
                prefetch=settings.prefetch,
                loop=self.loop,
                store=store,
                step_s=step_s,
            )
        )

    def add_thread(self, code: Callable[[], Result]) -> asyncio.Task[Result]:
        """Run what blocks, such as a trainer of your own, beside the run."""
        thread = self._group.create_task(_in_own_thread(code))
        self._threads.append(thread)
        return thread

    async def open_line(self) -> Line:
        """Return a line to the hub for a member of your own; closed with the run."""
        return await self._exits.enter_async_context(Line(self.address))

    async def control(self) -> ControlClient:
        """Return an operator's client; closed with the run."""
        client = ControlClient(self.address, token=self.operator_token)
        return await self._exits.enter_async_context(client)

    async def finish(self, *, timeout_s: float = 60.0) -> RunStatus:
        """Wait until the run is over and everybody has left; `failure` says why one failed.

        Raises:
            TimeoutError: It took too long; says what each trainer waits for.
        """
        members = [*(node.left for node in self.nodes.values()), *self._threads]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([self.serving, *members])
        except TimeoutError as error:
            raise TimeoutError(
                f"the run was not over after {timeout_s:g} s: {self._waits()}"
            ) from error
        return await self.serving

    async def close(self) -> None:
        """Stop what still runs and let threads come to an end; the end of the block does it."""
        with suppress(AstraflowError):
            self.hub.apply(RunStopped(mode=StopMode.CANCEL))
        if self._threads:
            await asyncio.wait(self._threads, timeout=_THREAD_GRACE_S)
        for node in self.nodes.values():
            node.left.cancel()
        if not self.hub.executor.over.is_set():
            # One whose run is over ends by itself, and would leave a thread that writes.
            self.serving.cancel()

    def advance(self, seconds: float) -> None:
        """Move the hub's manual clock on.

        Members go by the machine's clock, in which no time passes: the sessions of all whose
        line is not silent are renewed on the way.

        Raises:
            RuntimeError: The run was not started with a ManualClock.
        """
        if not isinstance(self._clock, ManualClock):
            raise RuntimeError("start_run(clock=ManualClock()) makes time move by hand")  # noqa: TRY004 - a misuse, whatever the clock is
        step_s = self.recipe.hub.session_ttl_s / 4
        while seconds > 0:
            self._clock.advance(min(step_s, seconds))
            seconds -= step_s
            self._renew_sessions()
            self.hub.apply(Ticked())

    def status(self) -> RunStatus:
        """Return the whole state, also of a run that is over."""
        return self.hub.status()

    def rollouts(self) -> tuple[RolloutRecord, ...]:
        """Return the accepted rollouts and what became of each, oldest first."""
        return tuple(reversed(self.hub.run.rollouts()))

    def accounts(self) -> tuple[LedgerAccount, ...]:
        """Return the books, one account per policy."""
        return self.hub.run.accounts()

    def _renew_sessions(self) -> None:
        silent = {name for name, node in self.nodes.items() if node.line.is_silent}
        for member in self.hub.status().members:
            if member.name not in silent:
                with suppress(AstraflowError):
                    self.hub.apply(MemberKeptAlive(member_id=member.member_id))

    def _waits(self) -> str:
        now = self.hub.now()
        reasons = [
            reason.message or str(reason.cause)
            for policy in self.recipe.policies
            for reason in self.hub.run.explain(PolicyId(policy), now)
        ]
        return "; ".join(reasons) or f"it is {self.hub.status().state}"


async def _in_own_thread(code: Callable[[], Result]) -> Result:
    # Of the event loop's own threads there are as few as a machine has cores, and four: trainers
    # would take those that the hub and nodes work with.
    return await in_own_thread(code, name="astraflow-member")


@asynccontextmanager
async def start_run(
    recipe: Recipe, *, run_dir: Path, clock: Clock | None = None
) -> AsyncGenerator[LiveRun]:
    """Serve the hub of a recipe; at the end of the block everything is taken down.

    Args:
        recipe: Such as `small_recipe` makes.
        run_dir: Folder of the run.
        clock: The hub's; a ManualClock makes `LiveRun.advance` work. None: the machine's.

    Raises:
        AstraflowError: What the hub raises when it cannot start.
        ExceptionGroup: What members and trainers of the run raised.
    """
    ready: asyncio.Future[tuple[Hub, str]] = asyncio.get_running_loop().create_future()
    serve = serve_hub(
        recipe,
        run_dir=run_dir,
        tokens=HubTokens(join=JOIN_TOKEN, operator=OPERATOR_TOKEN),
        on_ready=lambda hub, address: ready.set_result((hub, address)),
        clock=clock,
    )
    async with AsyncExitStack() as exits, asyncio.TaskGroup() as group:
        serving = group.create_task(serve)
        await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await serving
        hub, address = ready.result()
        run = LiveRun(
            recipe=recipe,
            hub=hub,
            address=address,
            run_dir=RunDir(run_dir),
            serving=serving,
            _group=group,
            _exits=exits,
            _clock=clock,
        )
        try:
            yield run
        except BaseException as error:
            try:
                await run.close()
            except asyncio.CancelledError:
                # A member failed meanwhile: what it raised is told beside this, not in its place.
                raise error from None
            raise
        await run.close()
