"""What every executor is: it starts processes of a run, tells how they fare, and ends them.

An executor is found by its name, `astraflow.executors` entry points of other packages included.
Those that start processes on other machines run the same script on each: what it holds may be
shown, and what is secret lies beside it in a file that only its user reads.
"""

import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar, cast
from uuid import uuid4

import yaml

from astraflow.config.run_dir import RunDir
from astraflow.config.strict import Strict
from astraflow.core.errors import CONFIGURATION_EXIT, AstraflowError, Reason
from astraflow.launch.processes import AS_MODULE, RoleCommand, last_lines

LOST: Final = -int(signal.SIGKILL)
"""Exit code of a process that is gone, nobody knows how; as one that was killed it may be started
again."""

_SHARE: Final = "all machines have to share the folder of the run: choose another by --runs"

_SIGNALLED: Final = 128

# What a cluster takes at most to end a process; a machine that is lost never answers.
_KILL_S: Final = 60.0

# Nobody waits longer for a command whose answer is of no use any more.
_UNDER_WAY_S: Final = 10.0

# What a process finds its way by, and what trackers and model hubs want to know.
_INHERITED: Final = ("ASTRAFLOW_", "HF_", "MLFLOW_", "OTEL_", "PYTHONPATH", "WANDB_", "XDG_CACHE_")


class ExecutorOptions(Strict):
    """What every executor for other machines may be told."""

    python: str = sys.executable
    """Interpreter that has astraflow installed, on every machine."""
    ranks_per_node: int | None = None
    """Ranks of a trainer on each machine; unset: gpus.count, or all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """The run that an executor works for.

    Attributes:
        run_dir: Its folder.
        name: Of the run.
        code: Folder of the recipe's code.
        note: Told of progress.
    """

    run_dir: RunDir
    name: str
    code: Path
    note: Callable[[str], None]


OptionsT = TypeVar("OptionsT", bound=ExecutorOptions)


class RemoteExecutor(ABC, Generic[OptionsT]):
    """What executors for other machines share.

    They start a script of the folder `jobs` of the run, next to which `NAME.env` holds the secrets.
    """

    options_type: ClassVar[type[ExecutorOptions]] = ExecutorOptions

    def __init__(self, place: RunPlace, options: OptionsT) -> None:
        self.place = place
        self.options = options
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def machine_count(self) -> int:
        """Machines that GPUs are planned for; 0: whoever runs the processes finds their GPUs."""
        return 0

    @abstractmethod
    def require(self) -> None:
        """Look for what it needs on this machine.

        Raises:
            AstraflowError: CAPABILITY_MISSING, with what to install.
        """

    @abstractmethod
    async def start(self, command: RoleCommand) -> "WatchedProcess":
        """Start a process; it need not have a place yet.

        Raises:
            AstraflowError: NOT_READY when it cannot be started.
        """

    async def sweep(self) -> None:
        """End all processes of the run that may be left of this launcher or an earlier one.

        Here none are: they end with who started them.
        """

    def preview(self, command: RoleCommand) -> str:
        """Return the script or manifest that a process would be started with."""
        return self.script(command)

    async def close(self) -> None:
        """Let go of all; nothing is started any more."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside what goes on, by the time of `close` at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def path(self, command: RoleCommand, kind: str) -> Path:
        """Return where a file of a process lies: `sh`, `env`, `pid` and others."""
        return self.place.run_dir.root.absolute() / "jobs" / f"{command.name}.{kind}"

    @property
    def _id_path(self) -> Path:
        return self.place.run_dir.root.absolute() / "jobs" / "run-id"

    @property
    def has_run_id(self) -> bool:
        """Whether a process of this run was started under its id, and not one of its original.

        The id is kept with where it lies: in a copy of a folder that is there still it is that of
        the other's processes.
        """
        if not self._id_path.exists():
            return False
        kept = self._id_path.read_text()
        original = Path(kept.partition("\n")[2] or self._id_path)
        is_copy = original.exists() and not original.samefile(self._id_path)
        return not (is_copy and original.read_text() == kept)

    @cached_property
    def run_id(self) -> str:
        """What tells the processes of this run from all others in a cluster."""
        if self.has_run_id:
            return self._id_path.read_text().partition("\n")[0]
        return uuid4().hex[:12]

    def keep_run_id(self) -> None:
        """Write the id into the folder of the run: who goes on with it finds what was left."""
        self._id_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._id_path.write_text(f"{self.run_id}\n{self._id_path}")

    def secrets_path(self, command: RoleCommand) -> Path | None:
        """Return where a process reads its secrets; None: its environment has them."""
        return self.path(command, "env")

    def script(self, command: RoleCommand) -> str:
        """Return what starts a process in the shell of another machine."""
        secrets = self.secrets_path(command)
        read = "" if secrets is None else f". {shlex.quote(str(secrets))}\n"
        said = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in command.environment.items())
        recipe = shlex.quote(str(self.place.run_dir.recipe.absolute()))
        return (
            f"#!/bin/sh\n# {command.name} of {self.place.name}\numask 077\n"
            f"if [ ! -r {recipe} ]; then\n"
            f'  echo "$(hostname) cannot read "{recipe}"; {_SHARE}" >&2\n'
            f"  exit {CONFIGURATION_EXIT}\nfi\n"
            f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null || cd\n"
            f"{read}{said}{self.launch_line(command)}\n"
        )

    def secret_environment(self, command: RoleCommand) -> Mapping[str, str]:
        """Return what of a process's environment nobody else may read."""
        inherited = {k: v for k, v in os.environ.items() if k.startswith(_INHERITED)}
        return {**inherited, **command.secrets}

    def secrets(self, command: RoleCommand) -> str:
        """Return the secrets of a process for a shell to read."""
        said = self.secret_environment(command)
        return "".join(f"export {k}={shlex.quote(v)}\n" for k, v in said.items())

    def launch_line(self, command: RoleCommand) -> str:
        """Return the last line of the script."""
        return "exec " + self.words(command)

    def words(self, command: RoleCommand) -> str:
        return shlex.join((self.options.python, *AS_MODULE, *command.arguments))

    def write_script(self, command: RoleCommand) -> Path:
        """Write the script of a process and its secrets, for this user alone; return its path."""
        script = self.path(command, "sh")
        script.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        command.log.parent.mkdir(parents=True, exist_ok=True)
        _write_private(self.path(command, "env"), self.secrets(command))
        _write_private(script, self.script(command))
        return script


_ProcessT = TypeVar("_ProcessT", bound="WatchedProcess")


class PollingExecutor(RemoteExecutor[OptionsT], Generic[OptionsT, _ProcessT]):
    """Asks its cluster every few seconds what became of the processes of the run.

    Attributes:
        poll_s: Between two polls.
        live: Processes that have not ended, by their names in the cluster.
    """

    poll_s: ClassVar[float]

    def __init__(self, place: RunPlace, options: OptionsT) -> None:
        super().__init__(place, options)
        self.live: dict[str, _ProcessT] = {}
        self._following: asyncio.Task[None] | None = None

    def follow(self, name: str, process: _ProcessT) -> None:
        """Follow a process until it has ended."""
        self.live[name] = process
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    @abstractmethod
    async def poll(self) -> None:
        """Give the processes what the cluster says of them.

        Raises:
            AstraflowError: NOT_READY when it does not answer; processes go on meanwhile.
        """

    async def _follow(self) -> None:
        is_away = False
        while True:
            await asyncio.sleep(self.poll_s)
            try:
                await self.poll()
                is_away = False
            except AstraflowError as error:
                if not is_away:
                    self.place.note(f"the cluster does not answer: {error.message}")
                is_away = True
            for name in [name for name, each in self.live.items() if each.exit_code is not None]:
                del self.live[name]

    async def close(self) -> None:
        await super().close()
        if self._following is not None:
            self._following.cancel()


def _write_private(path: Path, text: str) -> None:
    # One that a shell still reads stays whole.
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


class WatchedProcess(ABC):
    """A process elsewhere whose end somebody tells."""

    def __init__(self, command: RoleCommand) -> None:
        self.command = command
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def exit_code(self) -> int | None:
        """None while it runs or waits for a place; negative: ended by that signal, or lost."""
        return self._code.result() if self._code.done() else None

    def has_ended(self, code: int) -> None:
        """Tell its exit code; of several the first counts."""
        if not self._code.done():
            self._code.set_result(code)

    async def wait(self) -> int:
        """Return its exit code once it has ended."""
        return await asyncio.shield(self._code)

    @abstractmethod
    def send(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended takes none."""

    async def end(self, *, grace_s: float) -> None:
        """Ask it to end; take its place from it after `grace_s` seconds."""
        if self.exit_code is None:
            self.send(signal.SIGTERM)
            await asyncio.wait([self._code], timeout=grace_s)
        if self.exit_code is None:
            await self.kill()
            await asyncio.wait([self._code], timeout=_KILL_S)

    @abstractmethod
    async def kill(self) -> None:
        """Take its place from it, whatever it does."""

    def last_words(self) -> str:
        """Return the last lines of its log."""
        return last_lines(self.command.log) or f"nothing is in {self.command.log}; {_SHARE}"


class _Readable(yaml.SafeDumper):
    """Writes scripts as they are read."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        # yaml tells no types of what it takes here.
        return cast("Any", self).represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Readable.add_representer(str, _Readable.represent_str)


def as_yaml(*documents: Mapping[str, Any]) -> str:
    """Return manifests for people to read."""
    text = yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, explicit_start=True)
    return text.rstrip()


def merged(ours: Any, more: Any) -> Any:
    """Return a part of a manifest with more of it: what is said twice is as in `more`.

    Example:
        Of containers [{name: a, image: b}] and [{name: a, tty: true}, {name: c}] come
        [{name: a, image: b, tty: true}, {name: c}].
    """
    if isinstance(ours, Mapping) and isinstance(more, Mapping):
        old, new = cast("Mapping[str, Any]", ours), cast("Mapping[str, Any]", more)
        return {**old, **{k: merged(old[k], v) if k in old else v for k, v in new.items()}}
    if not isinstance(ours, list) or not isinstance(more, list):
        return more
    items: list[Any] = [*ours]
    for each in cast("list[Any]", more):
        same = [i for i, item in enumerate(items) if _key(each) and _key(item) == _key(each)]
        if same:
            items[same[0]] = merged(items[same[0]], each)
        else:
            items.append(each)
    return items


def _key(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return None
    said = cast("Mapping[str, Any]", item)
    return said.get("mountPath") or said.get("name")


def slug(name: str) -> str:
    """Return a name as clusters have them."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:30].strip("-")


def code_of_shell(code: int) -> int:
    """Return an exit code as a parent would see it: a shell adds 128 to a signal's number."""
    return _SIGNALLED - code if _SIGNALLED < code < _SIGNALLED + signal.NSIG else code


def require_commands(install: Mapping[str, str]) -> None:
    """Look for commands on the PATH.

    Args:
        install: What to do, by command.

    Raises:
        AstraflowError: CAPABILITY_MISSING.
    """
    for name, cure in install.items():
        if shutil.which(name) is None:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING, f"executor: the command {name} is missing; {cure}"
            )


async def call(*argv: str, stdin: str | None = None) -> str:
    """Return what a command says.

    Raises:
        AstraflowError: NOT_READY when it cannot be started or fails, with what it said.
    """
    code, said, errors = await attempt(*argv, stdin=stdin)
    if code:
        words = (errors or said).strip()[-800:]
        raise AstraflowError(
            Reason.NOT_READY, f"`{shlex.join(argv)}` ended with exit code {code}: {words}"
        )
    return said


async def attempt(*argv: str, stdin: str | None = None) -> tuple[int, str, str]:
    """Return the exit code of a command, what it said, and what it said of errors.

    Who is cancelled waits for its end: a job that it makes is there for the next sweep.

    Raises:
        AstraflowError: NOT_READY when it cannot be started.
    """
    answering = asyncio.create_task(_attempt(*argv, stdin=stdin))
    try:
        return await asyncio.shield(answering)
    except asyncio.CancelledError:
        await asyncio.wait([answering], timeout=_UNDER_WAY_S)
        raise


async def _attempt(*argv: str, stdin: str | None) -> tuple[int, str, str]:
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # Ctrl-C is for the launcher.
            start_new_session=True,
        )
    except OSError as error:
        raise AstraflowError(
            Reason.NOT_READY, f"`{shlex.join(argv)}` cannot be started: {error}"
        ) from error
    said, errors = await process.communicate(None if stdin is None else stdin.encode())
    code = process.returncode or 0
    return code, said.decode(errors="replace"), errors.decode(errors="replace")
