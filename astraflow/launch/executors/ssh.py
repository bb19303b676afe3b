"""ssh: processes on hosts that let this user in without a question.

What a process reads is copied to the host under the same path, unless hosts share their files. Its
standard input is a pipe that the launcher keeps: when the connection is gone, whoever ended it,
the process ends as one on this machine does. What it says comes back over the connection.
"""

import asyncio
import shlex
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from pydantic import Field

from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.executors.base import (
    LOST,
    ExecutorOptions,
    RemoteExecutor,
    RunPlace,
    WatchedProcess,
    attempt,
    call,
    code_of_shell,
    require_commands,
)
from astraflow.launch.processes import LIFELINE, RoleCommand

# That of a connection that cannot be made, or is gone.
_BROKEN: Final = 255

_FETCH_S: Final = 60.0

# Of the recipe's folder: code and small files that it reads.
_CODE: Final = ("*/", "*.py", "*.yaml", "*.yml", "*.json", "*.jsonl", "*.jinja", "*.txt", "*.toml")

_NOT_CODE: Final = (".*", "__pycache__", "runs", "node_modules")


class SshOptions(ExecutorOptions):
    """Options of the executor ssh."""

    hosts: tuple[str, ...] = Field(min_length=1)
    """As ssh knows them, such as gpu-1 or me@10.0.0.7."""
    args: tuple[str, ...] = ()
    """Further arguments of ssh, such as -p 2222 or -F FILE."""
    files: tuple[Path, ...] = ()
    """More that processes read; absolute."""


class SshProcess(WatchedProcess):
    """A process on one or more hosts, by one connection each."""

    def __init__(
        self,
        command: RoleCommand,
        executor: "SshExecutor",
        connections: Sequence[tuple[str, Process]],
    ) -> None:
        super().__init__(command)
        self._executor = executor
        self._connections = connections
        executor.later(self._see_end())

    async def _see_end(self) -> None:
        """End as the first that failed, which ends the others, else with 0."""
        code = 0
        for ended in asyncio.as_completed([each.wait() for _, each in self._connections]):
            said = await ended
            if said and not code:
                code = LOST if said in (_BROKEN, -signal.SIGTERM) else code_of_shell(said)
                self._hang_up()
        name, hosts = self.command.name, {host for host, _ in self._connections}
        await self._executor.fetch(hosts, trainer=name if name.startswith("trainer-") else "")
        self.has_ended(code)

    def send(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            self._executor.later(self._signal(number))

    async def _signal(self, number: signal.Signals) -> None:
        signals = (
            self._executor.signal(self.command, host, place, number)
            for place, (host, each) in enumerate(self._connections)
            if each.returncode is None
        )
        await asyncio.gather(*signals)

    async def kill(self) -> None:
        await self._signal(signal.SIGKILL)
        self._hang_up()

    def _hang_up(self) -> None:
        """End the connections; processes that are left notice, and end."""
        for _, each in self._connections:
            with suppress(ProcessLookupError):
                each.terminate()


class SshExecutor(RemoteExecutor[SshOptions]):
    """Starts processes over ssh."""

    options_type = SshOptions

    def __init__(self, place: RunPlace, options: SshOptions) -> None:
        super().__init__(place, options)
        self._next = 0
        self._fetching: asyncio.Task[None] | None = None
        self._shares: dict[str, bool] = {}

    @property
    def machine_count(self) -> int:
        return len(self.options.hosts)

    def require(self) -> None:
        require_commands(
            {
                "ssh": "apt-get install openssh-client",
                "rsync": "apt-get install rsync, here and on the hosts",
            }
        )
        if self.place.code.resolve() in (Path("/"), Path.home()):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"code: all of {self.place.code} would be copied to every host; put the recipe "
                "into a folder of its own",
            )

    def hosts_of(self, command: RoleCommand) -> Sequence[str]:
        """Return where a process is to be: as planned, else on the next hosts.

        Raises:
            AstraflowError: INVALID_FIELD for one on more machines than there are.
        """
        hosts = self.options.hosts
        if command.machines:
            return [hosts[machine] for machine in command.machines]
        if command.machine_count > len(hosts):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"executor.options.hosts: {command.name} is on {command.machine_count} machines, "
                f"and there are {len(hosts)}; name more, or raise ranks_per_node",
            )
        first, self._next = self._next, self._next + command.machine_count
        return [hosts[(first + i) % len(hosts)] for i in range(command.machine_count)]

    def launch_line(self, command: RoleCommand) -> str:
        pid = f"{shlex.quote(str(self.path(command, 'pid')))}.$1"
        # In the background it would have no standard input of its own.
        return (
            f"rm -f {pid}\nexport {LIFELINE}=3\nexec 3<&0 </dev/null\n"
            f"{self.words(command)} &\necho $! > {pid}\nwait $!"
        )

    def preview(self, command: RoleCommand) -> str:
        hosts = enumerate(self.hosts_of(command))
        lines = [f"# {shlex.join(self._run(command, host, place))}" for place, host in hosts]
        return "\n".join([*lines, self.script(command)])

    def _ssh(self) -> Sequence[str]:
        alive = ("BatchMode=yes", "ServerAliveInterval=5")
        return ("ssh", *(part for each in alive for part in ("-o", each)), *self.options.args)

    def _run(self, command: RoleCommand, host: str, place: int) -> Sequence[str]:
        return (*self._ssh(), host, f"sh {shlex.quote(str(self.path(command, 'sh')))} {place}")

    async def start(self, command: RoleCommand) -> SshProcess:
        hosts = self.hosts_of(command)
        self.write_script(command)
        await asyncio.gather(*(self._copy(command, host) for host in set(hosts)))
        if len(hosts) > 1 and not all(self._shares[host] for host in hosts):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"executor: {command.name} is on several hosts, which write its checkpoints "
                "together; run it in a folder that they and this machine share (--runs)",
            )
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch_often())
        connections: list[tuple[str, Process]] = []
        with command.log.open("ab") as log:
            for place, host in enumerate(hosts):
                process = await asyncio.create_subprocess_exec(
                    *self._run(command, host, place),
                    stdin=PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                connections.append((host, process))
        return SshProcess(command, self, connections)

    async def signal(
        self, command: RoleCommand, host: str, place: int, number: signal.Signals
    ) -> None:
        """Send a signal to a process on a host."""
        pid = shlex.quote(f"{self.path(command, 'pid')}.{place}")
        name = number.name.removeprefix("SIG")
        await attempt(*self._ssh(), host, f"kill -{name} $(cat {pid})")

    async def _copy(self, command: RoleCommand, host: str) -> None:
        """Have a host see what a process reads.

        Raises:
            AstraflowError: NOT_READY for a host that cannot be reached or written to.
        """
        if await self._sees_files(host):
            return
        words = [*command.arguments, *command.environment.values()]
        named = {Path(word.rpartition("=")[2]) for word in words if "/" in word}
        paths = [path for path in named if path.is_absolute() and path.exists()]
        paths += [self.path(command, "sh"), self.path(command, "env"), *self.options.files]
        if "--resume" in command.arguments:
            paths.append(self._checkpoints)
        root = self.place.run_dir.root.absolute()
        mine = sorted({str(path) for path in paths if path.exists()} - {str(root)})
        await self._rsync(*mine, f"{host}:/")
        rules = [f"--exclude={each}" for each in _NOT_CODE]
        rules += [f"--include={each}" for each in _CODE]
        code = str(self.place.code.absolute())
        await self._rsync(*rules, "--exclude=*", "--prune-empty-dirs", f"{code}/", f"{host}:/")

    async def _sees_files(self, host: str) -> bool:
        """Whether a host sees the files of this machine."""
        if host not in self._shares:
            mark = self.place.run_dir.root.absolute() / "jobs" / f"mark-{uuid4().hex}"
            mark.touch()
            test = f"test -e {shlex.quote(str(mark))}"
            try:
                code, _, errors = await attempt(*self._ssh(), host, test)
            finally:
                mark.unlink()
            if code == _BROKEN:
                raise AstraflowError(
                    Reason.NOT_READY,
                    f"executor.options.hosts: {host} cannot be reached: {errors.strip()[-300:]}; "
                    f"`ssh {host}` has to work without a question",
                )
            self._shares[host] = code == 0
        return self._shares[host]

    async def _rsync(self, *arguments: str) -> None:
        # A snapshot of a model hub is links to files elsewhere.
        shell = shlex.join(self._ssh())
        flags = ("--archive", "--copy-links", "--relative", "--no-implied-dirs")
        await call("rsync", *flags, "-e", shell, *arguments)

    @property
    def _checkpoints(self) -> Path:
        return self.place.run_dir.root.absolute() / "checkpoints"

    async def fetch(self, hosts: Collection[str], *, trainer: str = "") -> None:
        """Bring checkpoints back that trainers on hosts have written.

        Args:
            hosts: Which; one without trainers has no checkpoints.
            trainer: One that has ended there, whose last checkpoint people miss; empty: none.
        """
        # More may be named meanwhile.
        for host in tuple(hosts):
            if not self._shares[host]:
                try:
                    await self._rsync(f"{host}:{self._checkpoints}", "/")
                except AstraflowError as error:
                    if trainer:
                        what = f"{trainer}: its checkpoints stay on {host}"
                        self.place.note(f"{what}, in {self._checkpoints}: {error.message}")

    async def _fetch_often(self) -> None:
        while True:
            await asyncio.sleep(_FETCH_S)
            await self.fetch(self._shares)

    async def close(self) -> None:
        await super().close()
        if self._fetching is not None:
            self._fetching.cancel()
