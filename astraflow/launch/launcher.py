"""`astraflow run`: starts every role of a recipe, watches them, and starts some of them anew."""

import asyncio
import json
import shlex
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal, TypeAlias, cast

from rich.console import Console
from rich.markup import escape

from astraflow.client.control import ControlClient
from astraflow.config.loader import dump_recipe
from astraflow.config.recipe import Recipe, Restarts
from astraflow.config.run_dir import RunDir, read_json
from astraflow.core.errors import (
    BLOCKED_EXIT,
    CONFIGURATION_EXIT,
    TEMPORARY_EXIT,
    AstraflowError,
    Failure,
    Reason,
)
from astraflow.core.ids import PolicyId
from astraflow.core.members import MemberRole
from astraflow.core.status import RunState, RunStatus, StopMode, WaitCause
from astraflow.dataflow.journals import is_begun
from astraflow.dataflow.recorder import write_whole
from astraflow.launch.executors.finding import Executor, Placement, StartedProcess, reachable
from astraflow.launch.models import pinned, prepare_models
from astraflow.launch.processes import (
    JOIN_TOKEN,
    LocalExecutor,
    RoleCommand,
    Roles,
    open_rendezvous,
)
from astraflow.launch.run_folder import (
    claimed_run_dir,
    endpoint_before,
    held_run_dir,
    must_have,
    next_node_index,
    reopened_recipe,
)
from astraflow.launch.status import RunProgress, UnbrokenOutput
from astraflow.launch.summary import STOPPED, RunSummary, draw_reward, show_summary, summarise
from astraflow.launch.tracking.follower import followed
from astraflow.rpc.access import HubTokens
from astraflow.rpc.address import split_addresses
from astraflow.rpc.concurrency import Backoff, Retry, first_of

# A hub that was killed is there again long before, on a busy machine too.
_HUB_PATIENCE_S = 20.0

# Then people are told why it takes long: reading millions of rows may take minutes.
_HUB_SLOW_S = 30.0

_END_S = 20.0

# What is stopped at once has so long, as has what has not begun.
_STOP_S = 3.0

# Controllers of clusters are restarted, and refuse what comes meanwhile.
_CLUSTER_AWAY_S = 300.0

_CLUSTER_BACKOFF = Backoff(first_s=1.0, limit_s=5.0)

_MEANINGS = {
    CONFIGURATION_EXIT: ", it cannot work as it is set up",
    BLOCKED_EXIT: ", code of a workflow or scorer blocked it for good",
}


RestartKey: TypeAlias = Literal["raas", "trainer", "hub"]


class RestartLimit:
    """Bounds how often a run starts again what died, each role by itself.

    Example:
        Of 3 in 600 s the fourth, after 599 s, is refused; after 600 s the first does not count.
    """

    def __init__(self, settings: Restarts) -> None:
        self._settings = settings
        self._times: dict[str, deque[float]] = {}

    def allow(self, key: RestartKey, now_s: float, *, name: str = "") -> bool:
        """Return whether it may be started again now, and count it.

        Args:
            key: Of the recipe's `restarts`.
            now_s: On a clock that never goes back.
            name: Tells those apart that are counted by themselves.
        """
        times = self._times.setdefault(key + name, deque())
        while times and times[0] <= now_s - self._settings.window_s:
            times.popleft()
        is_allowed = len(times) < getattr(self._settings, key)
        if is_allowed:
            times.append(now_s)
        return is_allowed

    def reached(self, key: RestartKey) -> str:
        """Return for people why it is not started again."""
        count, window_s = getattr(self._settings, key), self._settings.window_s
        return f"it is not started again: {count} restarts in {window_s:g} s (restarts.{key})"


@dataclass(slots=True, kw_only=True)
class Launcher:
    """One run in progress.

    Attributes:
        recipe: Resolved, with absolute paths.
        run_dir: Has it as `recipe.yaml`.
        console: Where progress goes.
        tokens: Of the run.
        is_resumed: Whether trainers go on from checkpoints.
        checkpoint_id: The one that all of them begin with; empty: the last of each.
        first_raas: Number of the first rollout node.
        limit: Of what is started again.
        places: Of trainers and nodes.
        local: Starts the hub and all else that is on this machine.
        hub: Its address, once it has started; `roles` and `control` are there then, too.
        seats: Of nodes in the plan, by name: a node that follows another has its GPUs.
        seen: Names of those that have been members.
        say: Tells people of progress.
    """

    recipe: Recipe
    run_dir: RunDir
    console: Console
    tokens: HubTokens = field(default_factory=HubTokens.generate)
    processes: list[StartedProcess] = field(default_factory=list[StartedProcess])
    failure: str | None = None
    is_resumed: bool = False
    checkpoint_id: str = ""
    first_raas: int = 0
    raas_count: int = 0
    interrupts: int = 0
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    last: RunStatus | None = None
    limit: RestartLimit = field(init=False)
    places: Placement = field(init=False)
    local: LocalExecutor = field(init=False)
    say: Callable[[str], None] = field(init=False)
    rendezvous: object = None
    hub: str = ""
    roles: Roles = field(init=False)
    control: ControlClient = field(init=False)
    seats: dict[str, int] = field(default_factory=dict[str, int])
    seen: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.limit = RestartLimit(self.recipe.restarts)
        self.say = self.console.print
        # A run that can be resumed has nothing to lose with them.
        is_kept = self.recipe.hub.journal.kind != "none"
        self.places = Placement.of(self.recipe, self.run_dir, note=self._note)
        self.local = LocalExecutor(orphan_signal=signal.SIGKILL if is_kept else signal.SIGTERM)

    @property
    def executor(self) -> Executor:
        """What starts trainers and nodes."""
        return self.places.executor or self.local

    def _note(self, line: str) -> None:
        self.say(escape(line))

    async def run(self) -> tuple[str, str | None]:
        """Run to the end; return the state and, where it failed, why."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            await self._run()
        except* AstraflowError as group:
            # Processes that were killed leave calls to them broken.
            if not self.killed.is_set():
                # Of a hub that ended its guard knows more than who calls it.
                self.failure = self.failure or str(first_of(group))
        finally:
            await self._end_all()
            await self.executor.close()
            if self.executor is not self.local:
                await self.local.close()
            self.run_dir.endpoint.unlink(missing_ok=True)
        if self.failure:
            return RunState.FAILED, self.failure
        if self.interrupts:
            return STOPPED, None
        return self.last.state if self.last else RunState.FAILED, None

    async def _end_all(self) -> None:
        """End all processes, and what a cluster may have of them; say where that cannot be."""
        grace_s = _STOP_S if self.interrupts else _END_S
        ends = (process.end(grace_s=grace_s) for process in self.processes)
        # A cluster that cannot end one of them may be able to end all.
        faults = {each for each in await asyncio.gather(*ends, return_exceptions=True) if each}
        try:
            await self.executor.sweep()
        except AstraflowError as error:
            faults.add(error)
        for fault in faults:
            if not isinstance(fault, AstraflowError):
                raise fault
            self._note(f"Processes of this run may be left on the cluster: {fault.message}")

    def _interrupt(self) -> None:
        self.interrupts += 1
        self.interrupted.set()
        if self.interrupts == 2:
            asyncio.get_running_loop().call_later(_STOP_S, self._kill)
        elif self.interrupts > 2:
            self._kill()

    def _kill(self) -> None:
        """End all processes: the journal and the checkpoints have what they did."""
        self.killed.set()
        for process in self.processes:
            process.send(signal.SIGKILL)

    async def _run(self) -> None:
        with RunProgress(self.console, self.recipe) as progress:
            self.say = progress.note
            starting = asyncio.create_task(self._start_all())
            interrupted = asyncio.create_task(self.interrupted.wait())
            await asyncio.wait([starting, interrupted], return_when=asyncio.FIRST_COMPLETED)
            interrupted.cancel()
            if not starting.done():
                # Nothing is under way that could be trained on.
                progress.note("Stopping: the run has not begun.")
                starting.cancel()
                await asyncio.wait([starting])
                return
            starting.result()
            async with ControlClient.of(self.run_dir, patience_s=_HUB_PATIENCE_S) as self.control:
                await self._watch(progress)

    async def _start_all(self) -> None:
        for line in () if self.places.gpus is None else self.places.gpus.lines():
            self.say(line)
        # Of which one that fails ends the others: a model may take long to make.
        async with asyncio.TaskGroup() as group:
            group.create_task(self.executor.sweep())
            starting = group.create_task(self._start_hub())
            preparing = group.create_task(
                prepare_models(
                    self.recipe,
                    self.run_dir,
                    executor=self.local,
                    note=self.say,
                    gpus=self.places.gpus if self.places.executor is None else None,
                )
            )
        self.hub, models = starting.result(), preparing.result()
        meeting = ""
        if self.places.has_trainers_of_many:
            host = split_addresses(self.hub)[0][0]
            meeting, self.rendezvous = await asyncio.to_thread(open_rendezvous, host)
        self.roles = self.places.roles(
            self.run_dir, tokens=self.tokens, models=models, rendezvous=meeting
        )
        if self.recipe.http.port is not None:
            await self._start(self.roles.gateway(self.hub))
        for policy in self.recipe.policies:
            if policy in self.recipe.http.trainers:
                continue
            command = self.roles.trainer(
                policy, self.hub, resume=self.is_resumed, checkpoint_id=self.checkpoint_id
            )
            if not self._is_elsewhere(command, command.name):
                await self._start(command)
        for place in range(self.recipe.raas.count):
            command = self._raas(place)
            if not self._is_elsewhere(command, f"raas-{place}"):
                await self._start(command)

    async def _start(self, command: RoleCommand) -> StartedProcess:
        is_member = command.name.startswith(("trainer-", "raas-"))
        process = await (self.executor if is_member else self.local).start(command)
        self.processes.append(process)
        return process

    def _raas(self, place: int) -> RoleCommand:
        """Return a rollout node under a name that was not used before."""
        index = self.first_raas + self.raas_count
        self.raas_count += 1
        command = self.roles.raas(index, self.hub, place=place)
        self.seats[command.name] = place
        return command

    def _is_elsewhere(self, command: RoleCommand, planned: str) -> bool:
        """Whether a process is planned for another machine; then say how it is started there."""
        plan = None if self.places.executor else self.places.gpus
        share = None if plan is None else plan.share(planned)
        if share is None or not share.machine:
            return False
        role = "node" if command.arguments[0] == "raas" else command.name.replace("-", ":", 1)
        said = {each: command.environment[each] for each in sorted(command.environment)}
        public = [f"{k}={shlex.quote(v)}" for k, v in said.items() if v]
        token = f"{JOIN_TOKEN}=$(astraflow token {shlex.quote(str(self.run_dir.root))} {role})"
        words = " ".join([*public, token, "astraflow", shlex.join(command.arguments)])
        self.say(f"on machine {share.machine}: {escape(words)}")
        return True

    async def _start_hub(self) -> str:
        """Start the hub and return its address."""

        def is_up() -> bool:
            """Whether the endpoint is that of this hub; one that died may have left another."""
            endpoint = endpoint_before(self.run_dir)
            return endpoint is not None and endpoint.pid == hub.pid

        roles = self.places.roles(self.run_dir, tokens=self.tokens, models={})
        hub = await self.local.start(roles.hub(reopens=self.is_resumed))
        self.processes.append(hub)
        ended = asyncio.create_task(hub.wait())
        patient_until: float | None = time.monotonic() + _HUB_SLOW_S
        while not is_up():
            done, _ = await asyncio.wait([ended], timeout=0.05)
            if done:
                raise AstraflowError(
                    Reason.NOT_READY,
                    f"the hub did not start, it ended with exit code {ended.result()}:\n"
                    f"{hub.last_words()}",
                )
            if patient_until is not None and time.monotonic() > patient_until:
                self._note(f"The hub still reads its data sets or its journal: {hub.command.log}")
                patient_until = None
        ended.cancel()
        # Started again it goes on as it was when it died, and that may be stopping.
        hub.command = roles.hub()
        return self.run_dir.read_endpoint().address

    async def _watch(self, progress: RunProgress) -> None:
        """Show the state until it is final; end the run when a process it needs is gone."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._show(progress))
            others = [group.create_task(self._guard(each)) for each in self.processes]
            others.append(group.create_task(self._obey_interrupts()))
            killed = group.create_task(self.killed.wait())
            await asyncio.wait([watching, killed], return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, killed, *others):
                task.cancel()
        await self._see_end()

    async def _see_end(self) -> None:
        """Let the processes of a run that is over end by themselves.

        Its hub stays until all trainers have left, who write their last checkpoints before.
        """
        newest = {each.command.name: each for each in self.processes}
        ending = asyncio.create_task(newest["hub"].wait())
        await asyncio.wait([ending], timeout=_END_S)
        if not ending.done():
            self.say("The last checkpoint is not written yet. Ctrl-C twice gives it up.")
        await ending
        # A node that has not joined yet would go on trying.
        late = (
            each
            for name, each in newest.items()
            if name.startswith("raas-") and name not in self.seen
        )
        await asyncio.gather(*(each.end(grace_s=_STOP_S) for each in late))
        waiting = asyncio.gather(*(process.wait() for process in self.processes))
        with suppress(TimeoutError):
            await asyncio.wait_for(waiting, _END_S)
        for each in self.last.members if self.last and not self.killed.is_set() else ():
            process = newest.get(each.name)
            if process and process.exit_code and each.role is MemberRole.TRAINER:
                why = f"{each.name} ended with exit code {process.exit_code}"
                self.failure = self.failure or f"{why}:\n{process.last_words()}"

    async def _show(self, progress: RunProgress) -> None:
        try:
            async for status in self.control.watch_run():
                self.last = status
                self.seen.update(each.name for each in status.members)
                progress.show(status)
        except AstraflowError:
            (*_, hub) = (each for each in self.processes if each.command.name == "hub")
            if self.last is None or hub.exit_code != 0:
                raise
            # One that was started again may end the run between two attempts to reach it.
            written = read_json(self.run_dir.status)
            failed = written["failure"]
            failure = failed and Failure(reason=Reason(failed["reason"]), message=failed["message"])
            self.last = replace(self.last, state=RunState(written["state"]), failure=failure)
        if self.last is not None and self.last.failure is not None:
            # What a process that could not work said is nearer to the cause than its withdrawal.
            self.failure = self.failure or str(self.last.failure)

    async def _obey_interrupts(self) -> None:
        await self.interrupted.wait()
        self.say("Draining: what is under way is trained on. Ctrl-C again stops at once.")
        await self.control.stop_run(StopMode.DRAIN)
        while self.interrupts < 2:
            self.interrupted.clear()
            await self.interrupted.wait()
        self.say("Stopping.")
        await self.control.stop_run(StopMode.CANCEL)

    async def _guard(self, process: StartedProcess) -> None:
        """Start a process anew that failed, as often as `restarts` allows; else fail the run.

        A node is started anew unless it cannot work as it is set up or the run ends; the run goes
        on without one while there are others. A hub that was killed or lost its database goes on
        where its journal ends, a trainer that was killed from its last checkpoint; so does one that
        left at a signal, as of a preemption, while its policy has steps to make. What fails
        otherwise fails the run, but while that ends: then only the last node matters, without
        which it is cancelled. Who asked for the end with Ctrl-C waits for no other node.
        """
        while True:
            code, name = await process.wait(), process.command.name
            role, _, policy = name.partition("-")
            if self.killed.is_set() or (not code and not await self._is_missed(name)):
                return
            key: RestartKey | None = None
            news, refused = "", ""
            is_stoppage = code < 0 or code == TEMPORARY_EXIT
            if role == "hub" and is_stoppage and is_begun(self.recipe, self.run_dir):
                why = "was killed" if code < 0 else "lost its database, or failed to decide"
                key, news = "hub", f"the hub {why} ({code}); it goes on where it was"
            elif role == "trainer" and code <= 0 and not self._is_over():
                why = f"was killed ({code})" if code else "has left"
                key, news = "trainer", f"the trainer of {policy} {why}"
                news += "; it goes on from its last checkpoint"
            # One that cannot work as it is set up would say the same again. The last evaluations
            # need nodes; who asked for the end wants it soon.
            elif (
                role == "raas"
                and code != CONFIGURATION_EXIT
                and not (self._is_over() or (self.interrupts and self._is_ending()))
            ):
                key, news = "raas", f"{name} ended ({code}); what it held is issued again"
            if key is not None:
                counted = policy if key == "trainer" else ""
                if self.limit.allow(key, time.monotonic(), name=counted):
                    self.say(f"[yellow]{news}[/]")
                    process = await self._start_again(self._anew(process.command))
                    continue
                refused = f"; {self.limit.reached(key)}"
            if self._is_ending():
                if role == "raas" and not self._has_nodes() and not self._is_over():
                    self.say(f"[yellow]{name} ended ({code}); no node is left[/]")
                    await self._cancel()
                return
            if role == "raas" and refused and self._has_nodes():
                self.say(f"[yellow]{name} ended ({code}){refused}; the other nodes go on[/]")
                return
            why = _MEANINGS.get(code, "") + refused
            self.failure = f"{name} ended with exit code {code}{why}:\n{process.last_words()}"
            await self._cancel()
            return

    async def _is_missed(self, name: str) -> bool:
        """Whether the run waits for a trainer that has left; of a node that has, say so."""
        role, _, policy = name.partition("-")
        # A hub that has ended misses nobody.
        with suppress(AstraflowError):
            state = (await self.control.get_run()).state
            if state.is_final or state is RunState.STOPPING:
                return False
            if role == "raas":
                rest = "the others go on" if self._has_nodes() else "the run waits for another one"
                self.say(f"[yellow]{name} has left; {rest}[/]")
            elif role == "trainer":
                waits = await self.control.ledger.explain_wait(PolicyId(policy))
                return any(each.cause is WaitCause.NO_TRAINER for each in waits)
        return False

    async def _start_again(self, command: RoleCommand) -> StartedProcess:
        """Start what takes the place of a process that ended; a cluster may be away meanwhile.

        Raises:
            AstraflowError: It was away for too long, or will not start it.
        """
        retry, is_away = Retry(_CLUSTER_AWAY_S, backoff=_CLUSTER_BACKOFF), False
        while True:
            try:
                return await self._start(command)
            except AstraflowError as error:
                if error.reason is not Reason.NOT_READY:
                    raise
                if not is_away:
                    self._note(f"{command.name} is not started yet: {error.message}")
                is_away = True
                await retry.pause(error)

    def _anew(self, command: RoleCommand) -> RoleCommand:
        """Return what takes the place of a process that ended."""
        role, _, policy = command.name.partition("-")
        if role == "raas":
            return self._raas(self.seats.pop(command.name))
        return command if role == "hub" else self.roles.trainer(policy, self.hub, resume=True)

    async def _cancel(self) -> None:
        with suppress(AstraflowError):
            await self.control.stop_run(StopMode.CANCEL)

    def _has_nodes(self) -> bool:
        return any(
            each.command.name.startswith("raas-") and each.exit_code is None
            for each in self.processes
        )

    def _is_over(self) -> bool:
        return self.last is not None and self.last.state.is_final

    def _is_ending(self) -> bool:
        return self.last is not None and (
            self.last.state.is_final or self.last.state is RunState.STOPPING
        )


def run_recipe(recipe: Recipe, *, runs: Path, console: Console) -> RunSummary:
    """Run a recipe to its end.

    Ctrl-C once drains: what is under way is trained on, and the run ends; twice stops it.

    Args:
        recipe: Resolved, with absolute paths.
        runs: The run's folder is made in here, under the recipe's name; an older one of that
            name is moved aside.
        console: Where progress and the final table go.

    Raises:
        AstraflowError: A run of this name is live, a model is missing, a process could not start,
            something of the Hugging Face hub cannot be had.
    """
    with claimed_run_dir(runs, recipe.name) as run_dir:
        recipe = pinned(recipe, note=console.print)
        if recipe.tracing.path is None:
            # All processes write their spans into one folder.
            path = run_dir.root.absolute() / "traces"
            tracing = recipe.tracing.model_copy(update={"path": path})
            recipe = recipe.model_copy(update={"tracing": tracing})
        run_dir.recipe.write_text(dump_recipe(recipe))
        return _see_through(Launcher(recipe=recipe, run_dir=run_dir, console=console))


def resume_run(
    folder: Path, *, console: Console, overrides: Sequence[str] = (), checkpoint_id: str = ""
) -> RunSummary:
    """Go on with a run that died, was stopped or reached its end, from its last checkpoints.

    Args:
        folder: Of the run.
        console: Where progress and the final table go.
        overrides: What changes in its recipe, each `a.b=value`: what the hub has not decided by,
            and how many steps are done.
        checkpoint_id: Of the whole run, which every trainer goes back to; empty: the last ones.

    Raises:
        AstraflowError: NOT_READY when there is no journal; NAME_TAKEN when the run is live;
            RUN_ENDED when nothing is left to do; INVALID_FIELD for what cannot change;
            CHECKPOINT_UNKNOWN; what `run_recipe` raises.
    """
    run_dir = RunDir(folder)
    must_have(run_dir, checkpoint_id)
    if not run_dir.recipe.exists():
        reopened_recipe(run_dir)
    with held_run_dir(run_dir, "look at it with `astraflow status`"):
        recipe = reachable(reopened_recipe(run_dir, overrides))
        before = endpoint_before(run_dir)
        tokens = HubTokens.generate()
        if before is not None:
            tokens = HubTokens(join=before.join_token, operator=before.operator_token)
        if overrides:
            write_whole(run_dir.recipe, dump_recipe(recipe))
        run_dir.status.unlink(missing_ok=True)
        return _see_through(
            Launcher(
                recipe=recipe,
                run_dir=run_dir,
                console=console,
                tokens=tokens,
                is_resumed=True,
                checkpoint_id=checkpoint_id,
                first_raas=next_node_index(run_dir),
            )
        )


def _see_through(launch: Launcher) -> RunSummary:
    """Run to the end, and tell what came of it."""
    launch.console.file = cast("IO[str]", UnbrokenOutput(launch.console.file))
    started = time.monotonic()
    before = read_json(launch.run_dir.summary) if launch.is_resumed else {}
    with followed(launch.run_dir, launch.recipe.track):
        state, failure = asyncio.run(launch.run())
    summary = summarise(
        launch.run_dir,
        name=launch.recipe.name,
        seed=launch.recipe.seed,
        state=state,
        wall_s=before.get("wall_s", 0.0) + time.monotonic() - started,
        failure=failure,
    )
    try:
        write_whole(launch.run_dir.summary, json.dumps(summary.to_json(), indent=2) + "\n")
        draw_reward(launch.run_dir)
    except OSError as error:
        # What the run came to is told on a full disk, too.
        why = escape(f"what came of the run cannot be written: {error}")
        launch.console.print(f"[yellow]{why}[/]")
    show_summary(launch.console, summary, launch.run_dir)
    return summary
