"""Slurm: every trainer and every node is a batch job.

The folder of the run has to be on a file system that all machines of the cluster share, with the
interpreter and the models. States come from one `squeue` a second for all jobs of the run.
"""

import json
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

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


def state_of(job: Mapping[str, Any]) -> str:
    """Return the state of a job as squeue has it; releases from 23.11 on tell several in a list."""
    states = job["job_state"]
    return states if isinstance(states, str) else cast("list[str]", states)[0]


def exit_code_of(job: Mapping[str, Any]) -> int | None:
    """Return how a job ended; None while it is not over.

    Its code is a wait status in numbers, or an object of later releases. Where Slurm took its
    place from it, it is that of a process that a signal ended.
    """
    state, said = state_of(job), job["exit_code"]
    if state in _WAITING or state in _RUNNING:
        return None
    if state not in ("COMPLETED", "FAILED"):
        return -signal.SIGTERM if state == "CANCELLED" else LOST
    if isinstance(said, int):
        number, status = said & 0x7F, said >> 8
    else:
        code = cast("Mapping[str, Any]", said)
        number, status = _number(code.get("signal", {}).get("id")), _number(code["return_code"])
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

    def update(self, job: Mapping[str, Any] | None) -> str | None:
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
        code, state, reason = exit_code_of(job), state_of(job), str(job.get("state_reason", ""))
        is_new, self.state = state != self.state, state
        if code is not None:
            self.has_ended(code)
        if state == "PENDING" and is_new and reason not in ("None", "Priority", ""):
            return f"{self.command.name}: job {self.job_id} waits ({reason})"
        if code == LOST:
            return f"{self.command.name}: job {self.job_id} ended as {state}"
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
        known = {job["job_id"]: job for job in await self._jobs()}
        for process in list(self.live.values()):
            if note := process.update(known.get(process.job_id)):
                self.place.note(note)

    async def _jobs(self) -> Sequence[Mapping[str, Any]]:
        """Return the jobs of this run.

        Raises:
            AstraflowError: NOT_READY when the controller does not answer.
        """
        said = await call("squeue", "--me", "--json", "--states=all")
        try:
            jobs = [job for job in json.loads(said)["jobs"] if self._is_mine(job)]
            # A release that calls them otherwise is told of here.
            _ = [(job["job_id"], job["job_state"], job["exit_code"]) for job in jobs]
        except (ValueError, KeyError) as error:
            raise AstraflowError(
                Reason.NOT_READY, f"squeue --json said what cannot be read: {error!r}"
            ) from error
        return jobs

    def _is_mine(self, job: Mapping[str, Any]) -> bool:
        comment = job.get("comment")
        if isinstance(comment, Mapping):
            comment = cast("Mapping[str, Any]", comment).get("job", "")
        return comment == self._mark

    async def sweep(self) -> None:
        left = [job for job in await self._jobs() if exit_code_of(job) is None]
        numbers = [str(job["job_id"]) for job in left]
        if numbers:
            await attempt("scancel", *numbers)
        if set(numbers) - self.live.keys():
            self.place.note(f"jobs that were left of this run are cancelled: {', '.join(numbers)}")
