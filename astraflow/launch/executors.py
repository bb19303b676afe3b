"""Executors: how nodes of a pool are started, and cleaned up after they left.

A node is never stopped while it works: it is drained through the hub, and an executor hears of it
when it has left.
"""

import asyncio
import os
import shlex
from collections.abc import Mapping
from typing import Protocol

from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.processes import RoleProcess
from astraflow.launch.roles import JOIN_TOKEN, Roles

_END_S = 20.0


class Executor(Protocol):
    """Starts nodes somewhere."""

    async def start(self, name: str) -> None:
        """Have a node of this name join.

        Raises:
            AstraflowError: NOT_READY when it cannot be started.
        """
        ...

    async def stop(self, name: str) -> None:
        """Clean up after a node that has left."""
        ...

    async def close(self) -> None:
        """Clean up at the end."""
        ...


class LocalExecutor:
    """Nodes as processes on this machine; they drain and leave when this process ends."""

    def __init__(self, roles: Roles, *, hub: str) -> None:
        """Prepare.

        Args:
            roles: Of the run.
            hub: host:port.
        """
        self._roles = roles
        self._hub = hub
        self._processes: dict[str, RoleProcess] = {}
        self._lifeline, self._keep = os.pipe()

    async def start(self, name: str) -> None:
        """Start a process."""
        command = self._roles.node(name, self._hub)
        self._processes[name] = await RoleProcess.start(command, lifeline=self._lifeline)

    async def stop(self, name: str) -> None:
        """See the process to its end, which it comes to by itself."""
        process = self._processes.pop(name, None)
        if process is not None:
            await process.end(grace_s=_END_S)

    async def close(self) -> None:
        """Let all drain and end."""
        await asyncio.gather(*map(self.stop, list(self._processes)))
        os.close(self._keep)
        os.close(self._lifeline)


class ShellExecutor:
    """Nodes started by a shell command, wherever that starts them.

    {name}, {hub}, {recipe} and {run} are filled in, each quoted for the shell.
    """

    def __init__(
        self, *, start: str, stop: str | None, join_token: str, values: Mapping[str, str]
    ) -> None:
        """Prepare.

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
        """Run the start command."""
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
