"""The processes of a run: which a recipe needs, and how each is started, in a session of its own.

A child gets the read end of a pipe whose write end the launcher keeps (its lifeline): when the
launcher dies in whatever way, the pipe closes, and the child ends by itself. One that may end at
any instant is killed by Linux with its launcher; the pipe is there for what the kernel misses,
which is a launcher that died before the child asked for it.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from uuid import uuid4

import structlog

from astraflow.config.extras import install
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.launch.gpus import (
    GpuPlan,
    GpuShare,
    gpu_environment,
    machines_of,
    node_demand,
)
from astraflow.rpc.access import HubTokens, TokenRole
from astraflow.rpc.address import join_address, outside_ip

AS_MODULE: Final = ("-P", "-m", "astraflow")
"""Arguments of Python. Else a file of the working directory, such as random.py, would be found
before Python's own module of that name; `see_working_directory` lets it be found after all."""

LIFELINE = "ASTRAFLOW_LIFELINE_FD"

ORPHAN_RANK = "ASTRAFLOW_RANK_OF_PID"

MEETING = "ASTRAFLOW_RANKS_MEET"
"""host:port, a name of its own and the number of machines of a trainer on several."""

_ORPHAN_SIGNAL = "ASTRAFLOW_ORPHAN_SIGNAL"

_PR_SET_PDEATHSIG = 1

_LAST_WORDS_S = 15.0

_READ_NBYTES = 1 << 16

# Of a log, which may have lines of days: what a process says of its end takes less.
_LAST_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCommand:
    """One process to start.

    Attributes:
        name: For people, logs and the table; unique in the run.
        arguments: Of the `astraflow` command.
        environment: Beside the launcher's own.
        secrets: More of it, which is neither shown nor an argument of anything.
        log: Takes what it writes to standard output and error.
        cpus: That it keeps busy, on each of its machines.
        gpus: To be found for it on each of its machines; 0 where a plan names them.
        machines: Of the plan; none: anywhere.
        machine_count: It runs as one process on each of so many, all at once.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    log: Path
    cpus: int = 1
    gpus: int = 0
    machines: tuple[int, ...] = ()
    machine_count: int = 1


class RoleProcess:
    """A role that was started on this machine."""

    def __init__(
        self,
        command: RoleCommand,
        process: asyncio.subprocess.Process,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.command = command
        self._process = process
        self._reading = None if on_line is None else asyncio.create_task(self._read(on_line))
        self._ending = asyncio.create_task(self._end())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._process.returncode

    async def wait(self) -> int:
        """Return its exit code once it has ended, and all that it said was heard."""
        return await asyncio.shield(self._ending)

    async def _end(self) -> int:
        """Wait for its end, and end what it leaves behind.

        At once: later its number may be that of a group of somebody else's processes.
        """
        code = await self._process.wait()
        self._kill_group()
        if self._reading is not None:
            await self._reading
        return code

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _read(self, on_line: Callable[[str], None]) -> None:
        output, begun = self._process.stdout, b""
        with self.command.log.open("ab", buffering=0) as log:
            # Not line by line: a stream refuses those of more than 64 KiB.
            while output is not None and (said := await output.read(_READ_NBYTES)):
                log.write(said)
                *lines, begun = (begun + said).split(b"\n")
                for line in lines:
                    on_line(line.decode(errors="replace").rstrip())
        if begun:
            on_line(begun.decode(errors="replace").rstrip())

    def send(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended takes none."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def end(self, *, grace_s: float) -> None:
        """Ask it to end; kill it with all its children after `grace_s` seconds."""
        if self.exit_code is None:
            self.send(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), grace_s)
        if self.exit_code is None:
            self._kill_group()
        await self.wait()

    def last_words(self) -> str:
        """Return the last lines of its log."""
        return last_lines(self.command.log)


class LocalExecutor:
    """Starts processes of this machine; they end with the one that started them."""

    def __init__(self, *, orphan_signal: signal.Signals = signal.SIGTERM) -> None:
        """Start nothing yet.

        Args:
            orphan_signal: How processes end when this one is gone; SIGKILL: at once.
        """
        self._orphan_signal = orphan_signal
        self._lifeline, self._keep = os.pipe()

    async def start(
        self, command: RoleCommand, *, on_line: Callable[[str], None] | None = None
    ) -> RoleProcess:
        """Start a process; it appends to its log.

        Args:
            command: What to start.
            on_line: Told of each line of its standard output, which goes to the log as well.
        """
        said = {LIFELINE: str(self._lifeline), _ORPHAN_SIGNAL: str(int(self._orphan_signal))}
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *AS_MODULE,
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log if on_line is None else asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **command.environment, **command.secrets, **said},
                pass_fds=(self._lifeline,),
                start_new_session=True,
            )
        return RoleProcess(command, process, on_line)

    async def sweep(self) -> None:
        """Nothing is left: processes end with the one that started them."""

    async def close(self) -> None:
        os.close(self._keep)
        os.close(self._lifeline)


def last_lines(log: Path) -> str:
    """Return the last lines of a log; none of one that is not there yet."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_NBYTES))
        said = file.read().decode(errors="replace")
    return "\n".join(said.splitlines()[-12:])


def hold_lifeline(*, first: signal.Signals | None = None) -> None:
    """End this process with the launcher that started it, or soon after, if there is one.

    Called once at the start of a role: a signal when the launcher is gone, SIGKILL when that
    did not end the process in 15 s.

    Args:
        first: The signal; SIGKILL for a process that goes on later where it was, whenever it
            ends. None: what the launcher said.
    """
    descriptor = os.environ.pop(LIFELINE, None)
    said = signal.Signals(int(os.environ.pop(_ORPHAN_SIGNAL, signal.SIGTERM)))
    if os.environ.get(ORPHAN_RANK) == str(os.getppid()) and sys.platform == "linux":
        die_with_parent()
    if descriptor is None:
        return
    first = first or said
    if first is signal.SIGKILL and sys.platform == "linux":
        die_with_parent()

    def follow() -> None:
        os.read(int(descriptor), 1)
        os.kill(os.getpid(), first)
        time.sleep(_LAST_WORDS_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="lifeline", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel of Linux kill this process when its parent ends."""
    import ctypes  # noqa: PLC0415 - not for every command

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


JOIN_TOKEN = "ASTRAFLOW_JOIN_TOKEN"  # noqa: S105 - the name of a variable, not a secret

OPERATOR_TOKEN = "ASTRAFLOW_OPERATOR_TOKEN"  # noqa: S105


# gRPC reads it where a channel names no authority.
_AUTHORITY: Final = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Makes the command of each role.

    Attributes:
        recipe: Resolved.
        run_dir: Where `recipe.yaml` lies and logs go.
        tokens: Of the run.
        models: Model directory of each policy.
        gpus: Which process computes where; None: each sees what the launcher sees.
        is_elsewhere: Whether trainers and nodes are on other machines.
        ranks_per_node: Of a trainer, on each machine; None: all.
        rendezvous: host:port at which the machines of one trainer meet.
    """

    recipe: Recipe
    run_dir: RunDir
    tokens: HubTokens
    models: Mapping[str, Path]
    gpus: GpuPlan | None = None
    is_elsewhere: bool = False
    ranks_per_node: int | None = None
    rendezvous: str = ""

    def hub(self, *, reopens: bool = False) -> RoleCommand:
        """Return the Dataflow process.

        Args:
            reopens: Whether a run that was stopped, failed or reached its end goes on.
        """
        return self._command(
            "hub",
            *("dataflow", "serve", str(self.run_dir.recipe)),
            *("--run-dir", str(self.run_dir.root)),
            *(("--reopen",) if reopens else ()),
            secrets={JOIN_TOKEN: self.tokens.join, OPERATOR_TOKEN: self.tokens.operator},
        )

    def trainer(
        self, policy_id: str, hub: str, *, resume: bool = False, checkpoint_id: str = ""
    ) -> RoleCommand:
        """Return the trainer of one policy; one that resumes goes on from its last checkpoint.

        Args:
            policy_id: Which policy.
            hub: host:port.
            resume: Whether it goes on from a checkpoint.
            checkpoint_id: From which; empty: its last one.
        """
        name = f"trainer-{policy_id}"
        settings = self.recipe.policies[policy_id]
        count = machines_of(settings, self.ranks_per_node)
        parts = [name] if count == 1 else [f"{name}.{place}" for place in range(count)]
        shares = [] if self.gpus is None else [self.gpus.share(each) for each in parts]
        environment = dict(gpu_environment(self.gpus, (shares or [None])[0], is_torch=True))
        if count > 1:
            environment |= {MEETING: f"{self.rendezvous}/{uuid4().hex}/{count}"}
        on_gpus = self._finds_gpus and settings.trainer.device != "cpu"
        made = self._command(
            name,
            *("trainer", "run", str(self.run_dir.recipe), "--policy", policy_id),
            *self._dials(hub),
            *(("--listen", "0.0.0.0:0", "--advertise", "auto") if self.is_elsewhere else ()),
            *("--model", str(self.models[policy_id]), "--run-dir", str(self.run_dir.root)),
            *self._metrics(1 + list(self.recipe.policies).index(policy_id)),
            *(("--resume",) if resume else ()),
            *(("--checkpoint", checkpoint_id) if checkpoint_id else ()),
            threads=settings.trainer.thread_count,
            secrets={JOIN_TOKEN: self.tokens.of_role(f"{TokenRole.TRAINER}:{policy_id}")},
            environment=environment,
        )
        ranks = settings.trainer.ranks // count
        return replace(
            made,
            gpus=ranks if on_gpus else 0,
            cpus=made.cpus * ranks,
            machines=tuple(share.machine for share in shares if share is not None),
            machine_count=count,
        )

    def gateway(self, hub: str) -> RoleCommand:
        """Return the HTTP gateway."""
        return self._command(
            "gateway",
            *("gateway", "serve", str(self.run_dir.recipe), *self._dials(hub)),
            *self._all_models(),
            secrets={JOIN_TOKEN: self.tokens.join, OPERATOR_TOKEN: self.tokens.operator},
        )

    def raas(self, index: int, hub: str, *, place: int | None = None) -> RoleCommand:
        """Return one rollout node of those that the run starts with.

        Args:
            index: In its name.
            hub: host:port.
            place: Of all that run at once, from 0: it computes where that one was planned to, and
                has its port for metrics; None: as its index.
        """
        seat = index if place is None else place
        share = None if self.gpus is None else self.gpus.share(f"raas-{seat}")
        return self.node(f"raas-{index}", hub, place=seat, share=share)

    def node(
        self, name: str, hub: str, *, place: int | None = None, share: GpuShare | None = None
    ) -> RoleCommand:
        """Return a rollout node.

        Args:
            name: Unique in the pool.
            hub: host:port.
            place: Of its port for metrics; None: a free one.
            share: Of the GPUs; None: it computes on none, and sees what the launcher sees.
        """
        is_embedded = self.recipe.raas.engine.kind == "embedded"
        memory = None if is_embedded or share is None else share.memory
        demand = node_demand(self.recipe) if self._finds_gpus else None
        made = self._command(
            name,
            *("raas", "join", str(self.run_dir.recipe), *self._dials(hub), "--name", name),
            *self._all_models(),
            *self._metrics(None if place is None else 1 + len(self.recipe.policies) + place),
            *(() if memory is None else ("--set", f"raas.engine.memory={memory}")),
            threads=self.recipe.raas.engine.thread_count,
            secrets={JOIN_TOKEN: self.tokens.of_role(TokenRole.NODE)},
            environment={}
            if share is None
            else gpu_environment(self.gpus, share, is_torch=is_embedded),
        )
        return replace(
            made,
            gpus=0 if demand is None else demand.gpu_count,
            machines=() if share is None else (share.machine,),
        )

    @property
    def _finds_gpus(self) -> bool:
        """Whether whoever runs the processes finds the GPUs that the recipe counts on."""
        return self.gpus is None and self.is_elsewhere and bool(self.recipe.gpus.count)

    def _all_models(self) -> list[str]:
        return [f"--model={policy}={path}" for policy, path in self.models.items()]

    def _dials(self, hub: str) -> tuple[str, ...]:
        """Return the options of a role that dials the hub, and serves others as the hub does."""
        files = self.recipe.hub.tls.model_dump(exclude_none=True)
        return (
            "--hub",
            hub,
            *(part for name in files for part in (f"--tls-{name}", str(files[name]))),
        )

    def _metrics(self, place: int | None) -> tuple[str, ...]:
        """Give a process a port of its own for its metrics, after the hub's; None: a free one."""
        listen = self.recipe.metrics.listen
        host, _, port = listen.rpartition(":")
        if not host or not int(port):
            return ()
        return ("--set", f"metrics.listen={host}:{0 if place is None else int(port) + place}")

    def _command(
        self,
        name: str,
        *arguments: str,
        secrets: Mapping[str, str],
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> RoleCommand:
        """Return a role; one whose environment says nothing of GPUs sees none that are planned."""
        if environment is None:
            environment = gpu_environment(self.gpus, None)
        tls = self.recipe.hub.tls
        if tls.certificate is not None and tls.ca is None:
            # They trust the hub's own certificate. As `--tls-ca` it would have those that serve
            # weights ask for the same of all who pull.
            environment = {_AUTHORITY: str(tls.certificate), **environment}
        return RoleCommand(
            name=name,
            arguments=arguments,
            # What the launcher's own environment may say is not for every role.
            environment={
                OPERATOR_TOKEN: "",
                **environment,
                "OMP_NUM_THREADS": str(threads),
            },
            secrets=secrets,
            log=self.run_dir.log(name),
            cpus=threads,
        )


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_HERE: Final = "127.0.0.1"


def run_ranks(arguments: Sequence[str], *, count: int) -> int:
    """Run an `astraflow` command as so many ranks; return its exit code.

    Those of a trainer on several machines are shared out equally, and meet where the environment
    says. When a signal ended a rank it ends this process, too: whoever started it sees that the
    trainer was killed, and can start it again.

    Args:
        arguments: Of the command.
        count: Of ranks, on all machines.
    """
    # They load torch.
    from torch.distributed.elastic.multiprocessing.api import (  # noqa: PLC0415
        DefaultLogsSpecs,
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    endpoint, run_id, machines = f"{_HERE}:0", uuid4().hex, "1"
    if meeting := os.environ.pop(MEETING, ""):
        endpoint, run_id, machines = meeting.split("/")
    os.environ[ORPHAN_RANK] = str(os.getpid())
    try:
        with TemporaryDirectory(prefix="astraflow-ranks-") as folder:
            config = LaunchConfig(
                min_nodes=int(machines),
                max_nodes=int(machines),
                nproc_per_node=count // int(machines),
                run_id=run_id,
                rdzv_backend="c10d",
                rdzv_endpoint=endpoint,
                rdzv_configs={"is_host": False} if meeting else {},
                local_addr=outside_ip() if meeting else _HERE,
                max_restarts=0,
                # Else a folder of its own is left behind.
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            elastic_launch(config, sys.executable)(*AS_MODULE, *arguments)
            return 0
    except SignalException:
        return 0
    except ChildFailedError as error:
        codes = [each.exitcode for each in error.failures.values()]
    log.error("ranks of the trainer ended", exit_codes=codes)
    # torchrun sends SIGTERM to those that are left.
    killed = [-code for code in codes if code < 0 and -code != signal.SIGTERM]
    if killed:
        if killed[0] != signal.SIGKILL:
            signal.signal(killed[0], signal.SIG_DFL)
        os.kill(os.getpid(), killed[0])
    return max(1, *codes)


def open_rendezvous(host: str) -> tuple[str, object]:
    """Listen where the machines of a trainer meet; return host:port, and what keeps it open.

    Args:
        host: As they dial this machine.

    Raises:
        AstraflowError: CAPABILITY_MISSING without torch.
    """
    try:
        from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 - loads torch
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"a trainer on several machines needs torch where it is launched: {install('torch')}",
        ) from error
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return join_address(host, store.port), store
