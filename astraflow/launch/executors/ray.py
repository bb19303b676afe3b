"""Ray: every process is the child of an actor that has a place of its own.

The folder of the run has to be on a file system that all machines of the cluster share, with the
interpreter and the models. Without an address a cluster of this machine alone is started.
"""

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from pydantic import Field

from astraflow.config.extras import install
from astraflow.core.errors import CONFIGURATION_EXIT, AstraflowError, Reason
from astraflow.launch.executors.base import (
    LOST,
    ExecutorOptions,
    RemoteExecutor,
    WatchedProcess,
    code_of_shell,
)
from astraflow.launch.processes import RoleCommand, die_with_parent

# Ray says nothing of a demand that it cannot meet now.
_PLACE_S: Final = 10.0


class RayOptions(ExecutorOptions):
    """Options of the executor ray."""

    address: str | None = None
    """Of the cluster, such as auto or ray://head:10001; unset: RAY_ADDRESS, else this machine."""
    resources: dict[str, float] = Field(default={})
    """More that each process takes, such as {TPU: 4}."""


class Child:
    """Runs a script where its actor is, and dies with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, script: str, log: str) -> int:
        """Run a script to its end; return its exit code.

        Raises:
            FileNotFoundError: The machine does not see the folder of the run.
        """
        with open(log, "ab") as file:  # noqa: PTH123
            self._process = subprocess.Popen(  # noqa: S603
                ("sh", script),  # noqa: S607
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one call of the kernel
            )
        return self._process.wait()

    def send(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


class RayProcess(WatchedProcess):
    """The actors of a process, in one placement group."""

    def __init__(self, command: RoleCommand, executor: "RayExecutor", group: Any) -> None:
        super().__init__(command)
        self._executor = executor
        self._group = group
        self._actors: Sequence[Any] = ()

    async def run(self, script: str, log: str) -> None:
        """Wait for a place, run there, and tell the end."""
        code = 1
        try:
            ready = _result(self._group.ready())
            done, _ = await asyncio.wait([ready], timeout=_PLACE_S)
            if not done:
                asked = self._executor.bundle(self.command)
                self._executor.place.note(f"{self.command.name}: waits for {asked} in the cluster")
            await ready
            self._actors = self._executor.actors(self.command, self._group)
            runs = [actor.run.remote(script, log) for actor in self._actors]
            for ended in asyncio.as_completed([_result(run) for run in runs]):
                code = await ended
                if code:
                    break
        except self._executor.ray.exceptions.RayTaskError as error:
            self._executor.place.note(f"{self.command.name}: {error.cause!r}")
            code = CONFIGURATION_EXIT if isinstance(error.cause, FileNotFoundError) else 1
        except self._executor.ray.exceptions.RayError:
            code = LOST
        finally:
            self._let_go()
            self.has_ended(code_of_shell(code))

    def _let_go(self) -> None:
        for actor in self._actors:
            self._executor.ray.kill(actor)
        self._executor.ray.util.remove_placement_group(self._group)

    def send(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            for actor in self._actors:
                actor.send.remote(int(number))

    async def kill(self) -> None:
        """Take the place from it; what waits for its actors then hears that they are gone."""
        self._let_go()
        self.has_ended(LOST)


def _result(reference: Any) -> "asyncio.Future[Any]":
    return asyncio.ensure_future(asyncio.wrap_future(reference.future()))


class RayExecutor(RemoteExecutor[RayOptions]):
    """Makes actors."""

    options_type = RayOptions

    @cached_property
    def ray(self) -> Any:
        """The package, connected to the cluster."""
        ray: Any = import_module("ray")
        options = self.options
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                address=options.address,
                namespace="astraflow",
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=None if options.address else False,
            )
        return ray

    def require(self) -> None:
        if find_spec("ray") is None:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING,
                f"executor: the package ray is missing: {install('ray')}, in the release of the "
                "cluster",
            )

    def bundle(self, command: RoleCommand) -> Mapping[str, float]:
        """Return what a process takes of each of its machines."""
        gpus = {"GPU": float(command.gpus)} if command.gpus else {}
        return {"CPU": float(command.cpus), **gpus, **self.options.resources}

    def preview(self, command: RoleCommand) -> str:
        asked = f"{command.machine_count} x {self.bundle(command)}"
        return f"# an actor in a placement group of {asked} runs\n{self.script(command)}"

    async def start(self, command: RoleCommand) -> RayProcess:
        script = str(self.write_script(command))
        # It takes seconds, and would take over signals.
        ray = await asyncio.to_thread(lambda: self.ray)
        group = ray.util.placement_group(
            [dict(self.bundle(command))] * command.machine_count,
            strategy="PACK" if command.machine_count == 1 else "STRICT_SPREAD",
        )
        process = RayProcess(command, self, group)
        self.later(process.run(script, str(command.log.absolute())))
        return process

    def actors(self, command: RoleCommand, group: Any) -> Sequence[Any]:
        """Return an actor in each place of a group."""
        bundle = dict(self.bundle(command))
        asked = {"num_cpus": bundle.pop("CPU"), "num_gpus": bundle.pop("GPU", 0.0)}
        kind = self.ray.remote(Child)
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return [
            kind.options(
                **asked,
                resources=bundle,
                # One waits for the end, one takes signals.
                max_concurrency=2,
                scheduling_strategy=strategy(group, placement_group_bundle_index=place),
            ).remote()
            for place in range(command.machine_count)
        ]

    async def close(self) -> None:
        await super().close()
        if "ray" in self.__dict__:
            await asyncio.to_thread(self.ray.shutdown)
