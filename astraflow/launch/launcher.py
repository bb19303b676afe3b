"""`astraflow run`: starts every role of a recipe, watches, and tells what came of it."""

import asyncio
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil
from rich.console import Console

from astraflow.client.control import ControlClient
from astraflow.config.loader import dump_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import RunState, RunStatus, StopMode
from astraflow.launch.models import prepare_models
from astraflow.launch.plot import draw_reward
from astraflow.launch.processes import RoleCommand, RoleProcess
from astraflow.launch.progress import Progress
from astraflow.launch.report import show_summary
from astraflow.launch.roles import Roles, RunTokens
from astraflow.launch.summary import STOPPED, RunSummary, summarise

# A hub that was killed is there again long before, on a busy machine too.
_HUB_PATIENCE_S = 20.0
_HUB_START_S = 60.0
_END_S = 20.0
_RAAS_RESTARTS = 3
_HUB_RESTARTS = 16
_TRAINER_RESTARTS = 16
_TRAINER = "trainer-"


def run_recipe(recipe: Recipe, *, runs: Path, console: Console) -> RunSummary:
    """Run a recipe to its end.

    Ctrl-C once drains: what is under way is trained on, and the run ends; twice stops it.

    Args:
        recipe: Resolved, with absolute paths.
        runs: The run's folder is made in here, under the recipe's name; an older one of that
            name is moved aside.
        console: Where progress and the final table go.

    Raises:
        AstraflowError: A run of this name is live, a model is missing, a process could not start.
    """
    started = time.monotonic()
    run_dir = claim_run_dir(runs, recipe.name)
    recipe = _with_trace_folder(recipe, run_dir)
    run_dir.recipe.write_text(dump_recipe(recipe))
    launch = _Launch(recipe=recipe, run_dir=run_dir, console=console)
    state, failure = asyncio.run(launch.run())
    summary = summarise(
        run_dir,
        name=recipe.name,
        seed=recipe.seed,
        state=state,
        wall_s=time.monotonic() - started,
        failure=failure,
    )
    draw_reward(run_dir)
    show_summary(console, summary, run_dir)
    return summary


def claim_run_dir(runs: Path, name: str) -> RunDir:
    """Make the run's folder; one that is there is moved aside, with its time in its name.

    Raises:
        AstraflowError: NAME_TAKEN when its hub still runs.
    """
    run_dir = RunDir(runs / name)
    if run_dir.root.exists():
        with suppress(AstraflowError):
            endpoint = run_dir.read_endpoint()
            if psutil.pid_exists(endpoint.pid):
                raise AstraflowError(
                    Reason.NAME_TAKEN,
                    f"{run_dir.root} is a live run (hub process {endpoint.pid}); wait for it, stop "
                    "it, or give this one another name with --name",
                ) from None
        made = datetime.fromtimestamp(run_dir.root.stat().st_mtime).astimezone()
        shutil.move(run_dir.root, _free(runs, f"{name}.{made:%Y%m%d-%H%M%S}"))
    run_dir.root.mkdir(parents=True)
    return run_dir


def _with_trace_folder(recipe: Recipe, run_dir: RunDir) -> Recipe:
    """Let all processes write their spans into one folder."""
    if recipe.tracing.path is not None:
        return recipe
    tracing = recipe.tracing.model_copy(update={"path": run_dir.root.absolute() / "traces"})
    return recipe.model_copy(update={"tracing": tracing})


def _free(runs: Path, name: str) -> Path:
    taken = (runs / name, *(runs / f"{name}-{number}" for number in range(1, 1000)))
    return next(path for path in taken if not path.exists())


@dataclass(slots=True, kw_only=True)
class _Launch:
    """One run in progress."""

    recipe: Recipe
    run_dir: RunDir
    console: Console
    tokens: RunTokens = field(default_factory=RunTokens)
    processes: list[RoleProcess] = field(default_factory=list[RoleProcess])
    failure: str | None = None
    raas_count: int = 0
    interrupts: int = 0
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    last: RunStatus | None = None

    async def run(self) -> tuple[str, str | None]:
        """Run to the end; return the state and, where it failed, why."""
        lifeline, keep = os.pipe()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            await self._run(lifeline)
        except* AstraflowError as group:
            self.failure = str(_first(group))
        finally:
            await asyncio.gather(*(process.end(grace_s=_END_S) for process in self.processes))
            os.close(keep)
            os.close(lifeline)
            self.run_dir.endpoint.unlink(missing_ok=True)
        return self._state(), self.failure

    def _state(self) -> str:
        if self.failure:
            return RunState.FAILED
        if self.interrupts:
            return STOPPED
        return self.last.state if self.last else RunState.FAILED

    def _interrupt(self) -> None:
        self.interrupts += 1
        self.interrupted.set()
        if self.interrupts > 2:
            for process in self.processes:
                process.send(signal.SIGKILL)

    async def _run(self, lifeline: int) -> None:
        with Progress(self.console, self.recipe) as progress:
            hub, models = await asyncio.gather(
                self._start_hub(lifeline),
                prepare_models(self.recipe, self.run_dir, lifeline=lifeline, note=progress.note),
            )
            roles = self._roles(models)
            for policy in self.recipe.policies:
                await self._start(roles.trainer(policy, hub), lifeline)
            for index in range(self.recipe.raas.count):
                await self._start(roles.raas(index, hub), lifeline)
            self.raas_count = self.recipe.raas.count
            token = self.tokens.operator
            async with ControlClient(hub, token=token, patience_s=_HUB_PATIENCE_S) as control:
                await self._watch(
                    _Scene(
                        hub=hub, roles=roles, control=control, progress=progress, lifeline=lifeline
                    )
                )

    def _roles(self, models: dict[str, Path]) -> Roles:
        return Roles(recipe=self.recipe, run_dir=self.run_dir, tokens=self.tokens, models=models)

    async def _start(self, command: RoleCommand, lifeline: int) -> RoleProcess:
        process = await RoleProcess.start(command, lifeline=lifeline)
        self.processes.append(process)
        return process

    async def _start_hub(self, lifeline: int) -> str:
        """Start the hub and return its address."""
        hub = await self._start(self._roles({}).hub(), lifeline)
        ended = asyncio.create_task(hub.wait())
        deadline = time.monotonic() + _HUB_START_S
        while not self.run_dir.endpoint.exists():
            done, _ = await asyncio.wait([ended], timeout=0.05)
            if done or time.monotonic() > deadline:
                ended.cancel()
                raise AstraflowError(
                    Reason.NOT_READY, f"the hub did not start:\n{hub.last_words()}"
                )
        ended.cancel()
        return self.run_dir.read_endpoint().address

    async def _watch(self, scene: "_Scene") -> None:
        """Show the state until it is final; end the run when a process it needs is gone."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._show(scene.control, scene.progress))
            others = [group.create_task(self._guard(each, scene)) for each in self.processes]
            others.append(group.create_task(self._obey_interrupts(scene.control, scene.progress)))
            await watching
            for task in others:
                task.cancel()
        await self._leave()

    async def _show(self, control: ControlClient, progress: Progress) -> None:
        async for status in control.watch_run():
            self.last = status
            progress.show(status)
        if self.last is not None and self.last.failure is not None:
            self.failure = f"{self.last.failure.reason}: {self.last.failure.message}"

    async def _obey_interrupts(self, control: ControlClient, progress: Progress) -> None:
        await self.interrupted.wait()
        progress.note("Draining: what is under way is trained on. Ctrl-C again stops at once.")
        await control.stop_run(StopMode.DRAIN)
        while self.interrupts < 2:
            self.interrupted.clear()
            await self.interrupted.wait()
        progress.note("Stopping.")
        await control.stop_run(StopMode.CANCEL)

    async def _guard(self, process: RoleProcess, scene: "_Scene") -> None:
        """Act on the end of a process: a RaaS is started anew, any other ends the run.

        A hub that a signal killed is started anew as well: it goes on where its journal ends.
        """
        if process.command.name == "hub":
            process = await self._guard_hub(process, scene)
        elif _is_trainer(process):
            process = await self._guard_trainer(process, scene)
        is_raas = _is_raas(process)
        while True:
            code = await process.wait()
            name = process.command.name
            if code == 0 or self._is_ending():
                return
            if not is_raas or self.raas_count >= self.recipe.raas.count + _RAAS_RESTARTS:
                break
            scene.progress.note(f"[yellow]{name} ended ({code}); what it held is issued again[/]")
            process = await self._start(
                scene.roles.raas(self.raas_count, scene.hub), scene.lifeline
            )
            self.raas_count += 1
        if is_raas and any(_is_raas(other) and other.exit_code is None for other in self.processes):
            scene.progress.note(f"[yellow]{name} ended ({code}); the other nodes go on[/]")
            return
        self.failure = f"{name} ended with exit code {code}:\n{process.last_words()}"
        with suppress(AstraflowError):
            await scene.control.stop_run(StopMode.CANCEL)

    async def _guard_hub(self, hub: RoleProcess, scene: "_Scene") -> RoleProcess:
        """Start a hub again that was killed; return the one that ended otherwise."""
        for _ in range(_HUB_RESTARTS):
            code = await hub.wait()
            if code >= 0 or self.interrupts > 2 or not self.run_dir.journal.exists():
                break
            scene.progress.note(f"[yellow]the hub was killed ({code}); it goes on where it was[/]")
            hub = await self._start(hub.command, scene.lifeline)
        return hub

    async def _guard_trainer(self, trainer: RoleProcess, scene: "_Scene") -> RoleProcess:
        """Start a trainer again that was killed; return the one that ended otherwise."""
        policy = trainer.command.name.removeprefix(_TRAINER)
        for _ in range(_TRAINER_RESTARTS):
            code = await trainer.wait()
            if code >= 0 or self.interrupts > 2 or self._is_over():
                break
            scene.progress.note(
                f"[yellow]the trainer of {policy} was killed ({code}); it goes on from its last "
                "checkpoint[/]"
            )
            command = scene.roles.trainer(policy, scene.hub, resume=True)
            trainer = await self._start(command, scene.lifeline)
        return trainer

    def _is_over(self) -> bool:
        return self.last is not None and self.last.state.is_final

    def _is_ending(self) -> bool:
        return self.last is not None and (
            self.last.state.is_final or self.last.state is RunState.STOPPING
        )

    async def _leave(self) -> None:
        """Give the processes of a finished run time to end by themselves."""
        waiting = asyncio.gather(*(process.wait() for process in self.processes))
        with suppress(TimeoutError):
            await asyncio.wait_for(waiting, _END_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scene:
    """What those who watch a run share."""

    hub: str
    roles: Roles
    control: ControlClient
    progress: Progress
    lifeline: int


def _is_trainer(process: RoleProcess) -> bool:
    return process.command.name.startswith(_TRAINER)


def _is_raas(process: RoleProcess) -> bool:
    return process.command.name.startswith("raas-")


def _first(group: BaseExceptionGroup[AstraflowError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
