"""Slurm: every trainer and every node is a batch job.

The folder of the run has to be on a file system that all machines of the cluster share, with the
interpreter and the models. States come from one `squeue` a second for all jobs of the run.
"""

import json
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self, cast

from astraflow.core.errors import CONFIGURATION_EXIT, AstraflowError, Reason
from astraflow.launch.executors.base import (
    LOST,
    ExecutorOptions,
    PollingExecutor,
    WatchedProcess,
    attempt,
    call,
    code_of_shell,
    require_commands,
)
from astraflow.launch.processes import RoleCommand

# Of a job whose log cannot be opened.
_NO_OUTPUT: Final = 53

# A controller that was started again may not know the newest jobs for some seconds.
_MISSING_POLLS: Final = 10

_INSTALL: Final = (
    "run this where jobs are submitted, or install Slurm's client (Debian: slurm-client)"
)

_WAITING: Final = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}

_RUNNING: Final = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"}


class SlurmOptions(ExecutorOptions):
    """Options of the executor slurm."""

    partition: str | None = None
    """Unset: the cluster's default."""
    args: tuple[str, ...] = ()
    """Further arguments of sbatch, such as --account=lab or --time=8:00:00."""


class SlurmJob(NamedTuple):
    """What squeue says of a job.

    Attributes:
        job_id: Its number.
        state: Such as RUNNING.
        reason: Why it waits.
        exit_code: How it ended; None while it is not over. Where Slurm took its place from it,
            it is that of a process that a signal ended.
    """

    job_id: int
    state: str
    reason: str
    exit_code: int | None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """Return a job; releases from 23.11 on tell several states in a list."""
        states = said["job_state"]
        state = states if isinstance(states, str) else cast("list[str]", states)[0]
        reason, code = str(said.get("state_reason", "")), _exit_code(state, said["exit_code"])
        return cls(int(said["job_id"]), state, reason, code)


def _exit_code(state: str, said: Any) -> int | None:
    """Return how a job ended, by a wait status in numbers, or an object of later releases."""
    if state in _WAITING or state in _RUNNING:
        return None
    if state not in ("COMPLETED", "FAILED"):
        return -signal.SIGTERM if state == "CANCELLED" else LOST
    if isinstance(said, int):
        number, status = said & 0x7F, said >> 8
    else:
        number, status = _number(said.get("signal", {}).get("id")), _number(said["return_code"])
    if number:
        return CONFIGURATION_EXIT if number == _NO_OUTPUT else -number
    # srun tells of a signal as a shell does.
    return code_of_shell(status)


def _number(said: Any) -> int:
    if isinstance(said, Mapping):
        said = cast("Mapping[str, Any]", said).get("number")
    return int(said or 0)


class SlurmProcess(WatchedProcess):
    """A batch job."""

    def __init__(self, command: RoleCommand, executor: "SlurmExecutor", job_id: int) -> None:
        super().__init__(command)
        self.job_id = job_id
        self.state = ""
        self.missing_count = 0
        self._executor = executor

    def send(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            self._executor.later(self._send(number))

    async def _send(self, number: signal.Signals) -> None:
        # One that waits has nothing that takes a signal.
        if self.state not in _RUNNING or number is signal.SIGKILL:
            await self.kill()
            return
        await attempt("scancel", f"--signal={number.name.removeprefix('SIG')}", str(self.job_id))

    async def kill(self) -> None:
        await attempt("scancel", str(self.job_id))

    def update(self, job: SlurmJob | None) -> str | None:
        """Take what squeue says; return what people should know of it.

        Args:
            job: None: squeue does not know it.
        """
        if job is None:
            self.missing_count += 1
            if self.missing_count >= _MISSING_POLLS:
                self.has_ended(LOST)
                return f"{self.command.name}: Slurm does not know job {self.job_id} any more"
            return None
        self.missing_count = 0
        is_new, self.state = job.state != self.state, job.state
        if job.exit_code is not None:
            self.has_ended(job.exit_code)
        if job.state == "PENDING" and is_new and job.reason not in ("None", "Priority", ""):
            return f"{self.command.name}: job {self.job_id} waits ({job.reason})"
        if job.exit_code == LOST:
            return f"{self.command.name}: job {self.job_id} ended as {job.state}"
        return None


def _size(command: RoleCommand) -> Sequence[str]:
    """Return how many machines and cores a process takes, as sbatch and srun have it."""
    return (
        f"--nodes={command.machine_count}",
        f"--ntasks={command.machine_count}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={command.cpus}",
    )


class SlurmExecutor(PollingExecutor[SlurmOptions, SlurmProcess]):
    """Submits jobs."""

    options_type = SlurmOptions
    poll_s = 1.0

    def require(self) -> None:
        require_commands(dict.fromkeys(("sbatch", "squeue", "scancel"), _INSTALL))

    def launch_line(self, command: RoleCommand) -> str:
        # As a step of the job it gets the notice of a preemption, and so do all its machines.
        flags = shlex.join((*_size(command), "--kill-on-bad-exit=1", "--export=ALL"))
        return f"exec srun {flags} {self.words(command)}"

    def preview(self, command: RoleCommand) -> str:
        return f"# {shlex.join(self._sbatch(command))}\n{self.script(command)}"

    def _sbatch(self, command: RoleCommand) -> Sequence[str]:
        options = self.options
        return (
            "sbatch",
            "--parsable",
            "--no-requeue",
            f"--job-name={command.name}",
            f"--comment={self._mark}",
            *(() if options.partition is None else (f"--partition={options.partition}",)),
            *_size(command),
            *((f"--gres=gpu:{command.gpus}",) if command.gpus else ()),
            f"--output={command.log.absolute()}",
            "--open-mode=append",
            *options.args,
            str(self.path(command, "sh")),
        )

    @property
    def _mark(self) -> str:
        """What tells the jobs of this run from all others."""
        return f"astraflow:{self.place.run_dir.root.absolute()}"

    async def start(self, command: RoleCommand) -> SlurmProcess:
        self.write_script(command)
        said = await call(*self._sbatch(command))
        process = SlurmProcess(command, self, int(said.split(";")[0]))
        self.follow(str(process.job_id), process)
        return process

    async def poll(self) -> None:
        known = {job.job_id: job for job in await self._jobs()}
        for process in list(self.live.values()):
            if note := process.update(known.get(process.job_id)):
                self.place.note(note)

    async def _jobs(self) -> Sequence[SlurmJob]:
        """Return the jobs of this run.

        Raises:
            AstraflowError: NOT_READY when the controller does not answer, or says what cannot be
                read.
        """
        said = await call("squeue", "--me", "--json", "--states=all")
        try:
            return [SlurmJob.of(job) for job in json.loads(said)["jobs"] if self._is_mine(job)]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise AstraflowError(
                Reason.NOT_READY, f"squeue --json said what cannot be read: {error!r}"
            ) from error

    def _is_mine(self, job: Mapping[str, Any]) -> bool:
        comment = job.get("comment")
        if isinstance(comment, Mapping):
            comment = cast("Mapping[str, Any]", comment).get("job", "")
        return comment == self._mark

    async def sweep(self) -> None:
        left = [job for job in await self._jobs() if job.exit_code is None]
        numbers = [str(job.job_id) for job in left]
        if numbers:
            code, _, errors = await attempt("scancel", *numbers)
            # One that ended meanwhile cannot be cancelled.
            if code and any(job.exit_code is None for job in await self._jobs()):
                raise AstraflowError(
                    Reason.NOT_READY,
                    f"`scancel {' '.join(numbers)}` ended with exit code {code}: {errors.strip()}",
                )
        if set(numbers) - self.live.keys():
            self.place.note(f"jobs that were left of this run are cancelled: {', '.join(numbers)}")
