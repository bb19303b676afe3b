"""SkyPilot: every trainer and every node is a task on a cluster of its own, in any cloud it knows.

The folder of the run has to be on files that the launcher and all clusters share, such as a volume
of SkyPilot. Clusters are named by an id that lies in the folder: a launcher that goes on with the
run finds those that were left of it.
"""

import asyncio
import shlex
import signal
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final
from uuid import uuid4

from pydantic import Field

from astraflow.config.strict import Options
from astraflow.core.errors import CONFIGURATION_EXIT, AstraflowError, Reason
from astraflow.launch.executors.base import (
    LOST,
    ExecutorOptions,
    PollingExecutor,
    RunPlace,
    WatchedProcess,
    as_yaml,
    code_of_shell,
    slug,
)
from astraflow.launch.processes import RoleCommand

# A cluster whose job cannot be seen so often is lost.
_FAILED_POLLS: Final = 10


class SkyPilotOptions(ExecutorOptions):
    """Options of the executor skypilot."""

    python: str = "python"
    """Interpreter of the clusters that has astraflow installed."""
    task: Options = Field(default={})
    """What all tasks have, as in SkyPilot's YAML: resources, volumes, file_mounts, setup."""
    autodown_minutes: int | None = Field(default=10, ge=1)
    """A cluster that is idle for so long, as its launcher is gone, is torn down; None: it stays."""


class SkyPilotProcess(WatchedProcess):
    """A task on a cluster of its own."""

    def __init__(self, command: RoleCommand, executor: "SkyPilotExecutor", cluster: str) -> None:
        super().__init__(command)
        self.cluster = cluster
        self._executor = executor
        self._job_id: int | None = None
        self._failed_polls = 0

    async def launch(self, task: Any) -> None:
        """Wait for a cluster, and submit the task there."""
        minutes = self._executor.options.autodown_minutes
        self._log(f"how its cluster comes up: sky logs --provision {self.cluster}")
        try:
            self._job_id, _ = await self._executor.sdk.launch(
                task,
                cluster_name=self.cluster,
                retry_until_up=True,
                idle_minutes_to_autostop=minutes,
                down=minutes is not None,
                # Of two that are streamed at once in one process SkyPilot breaks one.
                stream_logs=None,
            )
        except Exception as error:  # noqa: BLE001 - those of SkyPilot have nothing in common
            if self.exit_code is None:
                self._log(f"{self.cluster} was not launched: {error}")
            self._finish(LOST)
        else:
            if self.exit_code is not None:
                # It was ended before SkyPilot had heard of it.
                await self._executor.down(self.cluster)

    def _log(self, line: str) -> None:
        with self.command.log.open("a") as log:
            log.write(f"{line}\n")

    async def update(self) -> None:
        """Ask how the job fares.

        Raises:
            AstraflowError: NOT_READY when SkyPilot's API server does not answer.
        """
        if self._job_id is None:
            return
        exceptions = self._executor.sky.exceptions
        try:
            states = await self._executor.sdk.job_status(
                self.cluster, [self._job_id], stream_logs=None
            )
        except exceptions.ApiServerConnectionError as error:
            raise AstraflowError(Reason.NOT_READY, str(error)) from error
        except (exceptions.ClusterDoesNotExist, exceptions.ClusterNotUpError):
            self._finish(LOST)
            return
        except Exception as error:  # noqa: BLE001 - those of SkyPilot have nothing in common
            self._failed_polls += 1
            if self._failed_polls == _FAILED_POLLS:
                self._executor.place.note(f"{self.command.name}: {self.cluster} is lost: {error}")
                self._finish(LOST)
            return
        self._failed_polls = 0
        state = states.get(self._job_id)
        if state is not None and state.is_terminal():
            await self._end(state.name)

    async def _end(self, state: str) -> None:
        if state in ("SUCCEEDED", "CANCELLED"):
            self._finish(0 if state == "SUCCEEDED" else -signal.SIGTERM)
            return
        path = self._executor.path(self.command, "code")
        written = sorted(path.parent.glob(f"{path.name}.*"), key=lambda each: each.stat().st_mtime)
        # On files that are shared what was written may not be there yet.
        codes = [code for each in written if (code := int(each.read_text() or LOST))]
        if not codes:
            # It came to no process: why is in the log of the job.
            with self.command.log.open("a") as log:
                try:
                    await self._executor.sdk.tail_logs(self.cluster, self._job_id, False, 30, log)
                except Exception as error:  # noqa: BLE001 - those of SkyPilot have nothing in common
                    log.write(f"the log of its job cannot be read: {error}\n")
        failed = LOST if state == "FAILED_DRIVER" else CONFIGURATION_EXIT
        self._finish(code_of_shell(codes[0]) if codes else failed)

    def _finish(self, code: int) -> None:
        if self.exit_code is None:
            self.has_ended(code)
            self._executor.later(self._executor.down(self.cluster))

    def send(self, number: signal.Signals) -> None:
        """Cancel the job, which has no time to drain; with SIGKILL tear its cluster down."""
        if self.exit_code is None:
            is_killed = number is signal.SIGKILL or self._job_id is None
            self._executor.later(self.kill() if is_killed else self._cancel())

    async def _cancel(self) -> None:
        try:
            await self._executor.sdk.cancel(self.cluster, job_ids=[self._job_id], stream_logs=None)
        except Exception:  # noqa: BLE001 - those of SkyPilot have nothing in common
            await self.kill()

    async def kill(self) -> None:
        self._finish(LOST)


class SkyPilotExecutor(PollingExecutor[SkyPilotOptions, SkyPilotProcess]):
    """Launches clusters."""

    options_type = SkyPilotOptions
    poll_s = 5.0

    def __init__(self, place: RunPlace, options: SkyPilotOptions) -> None:
        super().__init__(place, options)
        self._launched: set[str] = set()

    @cached_property
    def sky(self) -> Any:
        return import_module("sky")

    @cached_property
    def sdk(self) -> Any:
        """What talks to the API server."""
        return import_module("sky.client.sdk_async")

    def require(self) -> None:
        if find_spec("sky") is None:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING,
                "executor: the package skypilot is missing; pip install 'skypilot[CLOUD]' with the "
                "name of yours, such as aws or kubernetes, and see `sky check`",
            )

    def launch_line(self, command: RoleCommand) -> str:
        code = f"{shlex.quote(str(self.path(command, 'code')))}.$SKYPILOT_NODE_RANK"
        log = shlex.quote(str(command.log.absolute()))
        return (
            f"rm -f {code}\n{self.words(command)} >>{log} 2>&1\necho $? >{code}\nexit $(cat {code})"
        )

    def secrets_path(self, command: RoleCommand) -> None:
        """Tasks have them in their environment."""

    def task(self, command: RoleCommand) -> Mapping[str, Any]:
        """Return the task of a process, without its secrets.

        Raises:
            AstraflowError: INVALID_FIELD when nothing says what GPU it takes.
        """
        more = dict(self.options.task)
        resources = {"cpus": f"{command.cpus}+", **more.pop("resources", {})}
        kinds = resources.pop("accelerators", ())
        if command.gpus:
            if not kinds:
                raise AstraflowError(
                    Reason.INVALID_FIELD,
                    f"executor.options.task.resources.accelerators: {command.name} takes "
                    f"{command.gpus} GPUs; name their kind, such as H100",
                )
            names = [kinds] if isinstance(kinds, str) else kinds
            resources["accelerators"] = {each.partition(":")[0]: command.gpus for each in names}
        return {
            "name": slug(command.name),
            "num_nodes": command.machine_count,
            "resources": resources,
            **more,
            "run": self.script(command),
        }

    def _checked(self, command: RoleCommand, secrets: Mapping[str, str]) -> Any:
        """Return a task as SkyPilot has it.

        Raises:
            AstraflowError: INVALID_FIELD for what it refuses.
        """
        try:
            return self.sky.Task.from_yaml_config({**self.task(command), "secrets": dict(secrets)})
        except (ValueError, TypeError, KeyError) as error:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"executor.options.task: {str(error).strip()}"
            ) from error

    def preview(self, command: RoleCommand) -> str:
        names = self.secret_environment(command)
        self._checked(command, dict.fromkeys(names, "-"))
        shown = {**self.task(command), "secrets": dict.fromkeys(names)}
        return f"# sky launch --cluster={self._prefix}{slug(command.name)}\n{as_yaml(shown)}"

    @property
    def _prefix(self) -> str:
        return f"af-{self.run_id}-"

    async def start(self, command: RoleCommand) -> SkyPilotProcess:
        self.keep_run_id()
        command.log.parent.mkdir(parents=True, exist_ok=True)
        # It takes seconds.
        await asyncio.to_thread(lambda: self.sdk)
        task = await asyncio.to_thread(self._checked, command, self.secret_environment(command))
        cluster = f"{self._prefix}{slug(command.name)[:20]}-{uuid4().hex[:4]}"
        process = SkyPilotProcess(command, self, cluster)
        self._launched.add(cluster)
        self.follow(cluster, process)
        self.later(process.launch(task))
        return process

    async def poll(self) -> None:
        await asyncio.gather(*(process.update() for process in list(self.live.values())))

    async def _launches(self) -> Mapping[str, str]:
        """Return the requests for clusters of this run that are not over, by the cluster's name."""
        requests = [each for each in await self.sdk.api_status() if each.name == "sky.launch"]
        names = {each.cluster_name or "": each.request_id for each in requests}
        return {name: each for name, each in names.items() if name.startswith(self._prefix)}

    async def down(self, cluster: str) -> None:
        """Tear a cluster down, or stop its launch; people hear of one that may cost on."""
        try:
            # What a request has not made yet SkyPilot does not know.
            if request := (await self._launches()).get(cluster):
                await self.sdk.api_cancel([request], silent=True, stream_logs=None)
            await self.sdk.down(cluster, stream_logs=None)
        except self.sky.exceptions.ClusterDoesNotExist:
            return
        except Exception as error:  # noqa: BLE001 - those of SkyPilot have nothing in common
            self.place.note(f"{cluster} is not torn down ({error}): sky down {cluster}")

    async def sweep(self) -> None:
        if not self.has_run_id:
            return
        await asyncio.to_thread(lambda: self.sdk)
        try:
            launches = await self._launches()
            known = [each.name for each in await self.sdk.status(stream_logs=None)]
        except Exception as error:  # those of SkyPilot have nothing in common
            raise AstraflowError(
                Reason.NOT_READY, f"SkyPilot does not tell of clusters {self._prefix}*: {error}"
            ) from error
        mine = {name for name in known if name.startswith(self._prefix)} | launches.keys()
        if left := sorted(mine - self._launched):
            self.place.note(f"clusters that were left of this run go down: {', '.join(left)}")
        await asyncio.gather(*map(self.down, mine))
