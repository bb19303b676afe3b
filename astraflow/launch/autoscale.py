"""`astraflow autoscale`: acts on the hub's advice until the run is over.

A starter starts nodes, and cleans up after them. A node is never stopped while it works: it is
drained through the hub, and a starter hears of it when it has left.
"""

import asyncio
import json
import os
import secrets
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape

from astraflow.client.control import ControlClient
from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.autoscale import ScaleAdvice, ScalePlan, Scaler
from astraflow.core.clock import Clock, SteadyClock, SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import RunStatus
from astraflow.launch.executors.finding import Executor, Placement, StartedProcess
from astraflow.launch.gpus import GpuShare, spare_share
from astraflow.launch.models import prepare_models
from astraflow.launch.processes import JOIN_TOKEN, LocalExecutor, Roles
from astraflow.rpc.access import HubTokens, TokenRole
from astraflow.rpc.concurrency import interruption

_END_S = 20.0


class ExecutorStarter:
    """Nodes by the executor of the run; they drain and leave when this process ends."""

    def __init__(self, roles: Roles, executor: Executor, *, hub: str) -> None:
        """Start no node yet.

        Args:
            roles: Of the run.
            executor: Of the run.
            hub: host:port.
        """
        self._roles = roles
        self._executor = executor
        self._hub = hub
        self._nodes: dict[str, tuple[StartedProcess, GpuShare | None]] = {}

    async def start(self, name: str) -> None:
        """Start a process, on GPUs that nobody has; those of nodes that have ended are free.

        Raises:
            AstraflowError: NOT_READY when too few are free.
        """
        for ended, (process, _) in tuple(self._nodes.items()):
            if process.exit_code is None:
                continue
            if process.exit_code:
                why = escape(f"{ended} ended with exit code {process.exit_code}:")
                Console(stderr=True).print(f"[red]{why}[/]\n{escape(process.last_words())}")
            await self.stop(ended)
        share = None
        if self._roles.gpus is not None:
            shares = [each for _, each in self._nodes.values() if each is not None]
            held = {(each.machine, gpu) for each in shares for gpu in each.gpus}
            share = spare_share(self._roles.recipe, self._roles.gpus, held)
        command = self._roles.node(name, self._hub, share=share)
        self._nodes[name] = await self._executor.start(command), share

    async def stop(self, name: str) -> None:
        """See the process to its end, which it comes to by itself."""
        if name in self._nodes:
            process, _ = self._nodes[name]
            await process.end(grace_s=_END_S)
            del self._nodes[name]

    async def close(self) -> None:
        """Let all drain and end."""
        await asyncio.gather(*map(self.stop, list(self._nodes)))
        await self._executor.close()


class ShellStarter:
    """Nodes started by a shell command, wherever that starts them.

    {name}, {hub}, {recipe} and {run} are filled in, each quoted for the shell.
    """

    def __init__(
        self, *, start: str, stop: str | None, join_token: str, values: Mapping[str, str]
    ) -> None:
        """Start no node yet.

        Args:
            start: Template; exit code 0 means that the node is on its way.
            stop: Template; None: a node that left needs nothing.
            join_token: In the environment of both commands.
            values: hub, recipe and run.
        """
        self._start = start
        self._stop = stop
        self._environment = {**os.environ, JOIN_TOKEN: join_token}
        self._values = dict(values)

    async def start(self, name: str) -> None:
        await self._run(self._start, name)

    async def stop(self, name: str) -> None:
        """Run the stop command."""
        if self._stop is not None:
            await self._run(self._stop, name)

    async def close(self) -> None:
        """Leave all as it is: the nodes end with the run."""

    async def _run(self, template: str, name: str) -> None:
        command = fill(template, {**self._values, "name": name})
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
        )
        output, _ = await process.communicate()
        if process.returncode:
            said = output.decode(errors="replace").strip()[-500:]
            raise AstraflowError(
                Reason.NOT_READY,
                f"'{command}' ended with exit code {process.returncode}: {said}",
            )


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return a command with its placeholders filled in, each quoted for the shell.

    Raises:
        AstraflowError: INVALID_FIELD for a placeholder that is not known.
    """
    quoted = {name: shlex.quote(value) for name, value in values.items()}
    try:
        return template.format_map(quoted)
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join(f"{{{name}}}" for name in quoted)
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"'{template}' cannot be filled in ({error}); it may hold {known}; a brace is {{{{",
        ) from error


NodeStarter = ExecutorStarter | ShellStarter

_START_TIMEOUT = timedelta(minutes=10)


async def show_advice(run_dir: RunDir, *, as_json: bool) -> None:
    """Print what the hub advises, once; nothing is changed."""
    async with ControlClient.of(run_dir) as control:
        _print(await control.scale_advice(), ScalePlan(), as_json=as_json)


async def autoscale(run_dir: RunDir, *, poll_s: float, as_json: bool) -> None:
    """Start and drain nodes as the hub advises, until the run is over or Ctrl-C.

    Raises:
        AstraflowError: NOT_READY when the run has no hub.
    """
    endpoint = run_dir.read_endpoint()
    recipe = load_recipe(run_dir.recipe)
    starter = await _make_starter(recipe, run_dir, endpoint)
    try:
        async with ControlClient.of(run_dir) as control:
            loop = _Loop(
                control=control,
                starter=starter,
                run_dir=run_dir,
                patience_s=recipe.hub.patience_s,
                drain_s=recipe.autoscale.drain_s,
                as_json=as_json,
            )
            await loop.run(poll_s)
    finally:
        await starter.close()


async def _make_starter(recipe: Recipe, run_dir: RunDir, endpoint: HubEndpoint) -> NodeStarter:
    """Return what starts the nodes of a run, as its recipe says."""
    settings = recipe.autoscale
    tokens = HubTokens(join=endpoint.join_token, operator=endpoint.operator_token)
    if settings.start is not None:
        return ShellStarter(
            start=settings.start,
            stop=settings.stop,
            join_token=tokens.of_role(TokenRole.NODE),
            values={
                "hub": endpoint.address,
                "recipe": str(run_dir.recipe.absolute()),
                "run": str(run_dir.root.absolute()),
            },
        )
    console = Console(stderr=True, markup=False)
    places = Placement.of(recipe, run_dir, note=console.print)
    local = LocalExecutor()
    models = await prepare_models(
        recipe, run_dir, executor=local, note=lambda _: None, gpus=places.gpus
    )
    roles = places.roles(run_dir, tokens=tokens, models=models)
    return ExecutorStarter(roles, places.executor or local, hub=endpoint.address)


@dataclass(slots=True, kw_only=True)
class _Loop:
    """One maintainer at work."""

    control: ControlClient
    starter: NodeStarter
    run_dir: RunDir
    patience_s: float
    drain_s: float | None
    as_json: bool
    machine: Clock = field(default_factory=SystemClock)
    # In containers every life of a process has the same number, and nodes outlive a maintainer.
    scaler: Scaler = field(
        default_factory=lambda: Scaler(
            prefix=f"auto-{secrets.token_hex(3)}", start_timeout=_START_TIMEOUT
        )
    )
    leaving: dict[str, str] = field(default_factory=dict[str, str])
    last: str = ""
    heard_s: float = field(default_factory=time.monotonic)
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = SteadyClock(self.machine)

    async def run(self, poll_s: float) -> None:
        """Look and act until the run is over."""
        stopped = interruption()
        while not stopped.is_set() and await self._step():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), poll_s)

    async def _step(self) -> bool:
        """Act once; False: the run is over."""
        try:
            status = await self.control.get_run()
            if status.state.is_final:
                return False
            advice = await self.control.scale_advice()
        except AstraflowError as error:
            if error.reason is not Reason.NOT_READY:
                raise
            # The hub of a run that is over takes its address along; one that died comes back.
            is_over = not self.run_dir.endpoint.exists()
            is_lost = time.monotonic() - self.heard_s > self.patience_s
            if is_lost and not is_over:
                Console(stderr=True).print(f"[red]the hub is lost:[/] {escape(error.message)}")
            return not (is_over or is_lost)
        self.heard_s = time.monotonic()
        await self._clean_up(status)
        plan = self.scaler.plan(advice, self.clock.now())
        # Of a pool that stays people hear once.
        now = f"{advice.action} {advice.member_count} {advice.target_member_count}"
        if plan != ScalePlan() or now != self.last or self.as_json:
            _print(advice, plan, as_json=self.as_json)
        self.last = now
        await self._act(advice, plan)
        return True

    async def _act(self, advice: ScaleAdvice, plan: ScalePlan) -> None:
        for name in plan.start:
            try:
                await self.starter.start(name)
            except AstraflowError as error:
                self.scaler.forget(name)
                why = escape(error.message)
                Console(stderr=True).print(f"[red]{name} was not started:[/] {why}")
        names = {member.member_id: member.name for member in advice.members}
        for member_id in plan.drain:
            self.leaving[member_id] = names[member_id]
            with suppress(AstraflowError):
                await self.control.drain_member(member_id, grace_s=self.drain_s)

    async def _clean_up(self, status: RunStatus) -> None:
        """Tell the starter of those who have left."""
        present = {member.member_id for member in status.members}
        for member_id in [each for each in self.leaving if each not in present]:
            name = self.leaving.pop(member_id)
            try:
                await self.starter.stop(name)
            except AstraflowError as error:
                why = escape(error.message)
                Console(stderr=True).print(f"[yellow]{name} is not cleaned up:[/] {why}")


def to_json(advice: ScaleAdvice, plan: ScalePlan) -> dict[str, Any]:
    """Return advice and what is done about it as JSON values."""
    fields = asdict(advice)
    balance: dict[str, Any] = fields.pop("balance")
    balance["window_s"] = balance.pop("span").total_seconds()
    # Of the hub only; the wire does not carry them.
    del balance["token_rate"], balance["full_token_rate"]
    fields["retired"] = sorted(advice.retired)
    cooldown = advice.cooldown_time
    fields["cooldown_time"] = None if cooldown is None else cooldown.isoformat()
    wait = {"wait_fraction": advice.balance.wait_fraction}
    return {**fields, **balance, **wait, "started": plan.start, "drained": plan.drain}


def _print(advice: ScaleAdvice, plan: ScalePlan, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(advice, plan)), flush=True)  # noqa: T201 - the command's output
        return
    count, target = advice.member_count, advice.target_member_count
    nodes = f"{count} to {target} nodes" if target != count else f"at {count} nodes"
    Console().print(f"[bold]{advice.action}[/] {nodes}: {advice.message}")
    for name in plan.start:
        Console().print(f"  starts {name}")
    for member in advice.members:
        if member.member_id in plan.drain:
            Console().print(f"  drains {member.name}, which holds {member.inflight_count}")
