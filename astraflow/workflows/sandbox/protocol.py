"""What a sandbox is: a place of its own for programs that are not trusted.

What a program does is its own affair and comes back as a `Finished`: it hung, crashed, was killed
at a limit, or ended the sandbox around it. What the sandbox did is an `AstraflowError`
(ENVIRONMENT_FAILED): it could not start here, or was killed from outside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field

from astraflow.config.strict import Strict


class SandboxLimits(Strict):
    """What the programs of a sandbox may take; the base of every sandbox's `sandbox_options`."""

    time_s: float = Field(default=10.0, gt=0)
    """Seconds for one command; then everything in the sandbox is killed."""
    memory_mb: int = Field(default=512, ge=32)
    """MiB: address space of each program that is judged, private memory of each process of a
    command, and resident memory of all together."""
    processes: int = Field(default=32, ge=1)
    """Processes and threads at once."""
    output_mb: float = Field(default=1.0, gt=0)
    """MiB of standard output that are kept, and of standard error; the rest is dropped."""
    file_mb: int = Field(default=16, ge=1)
    """MiB of any one file."""
    disk_mb: int = Field(default=64, ge=1)
    """MiB of all files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What became of a command.

    Attributes:
        exit_code: None when a signal ended it.
        signal: Its number; None when it ended by itself.
        stdout: As much as `output_mb` allows.
        stderr: The same.
        is_timeout: It was killed after `time_s`.
        is_truncated: It printed more than `output_mb`.
        is_out_of_memory: It was killed because all its processes together took too much.
        is_lost: It ended the sandbox itself; nothing can run in it any more.
    """

    exit_code: int | None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    is_timeout: bool = False
    is_truncated: bool = False
    is_out_of_memory: bool = False
    is_lost: bool = False

    @property
    def is_well(self) -> bool:
        """Whether it ended by itself, with 0."""
        return self.exit_code == 0


class Sandbox(Protocol):
    """A place in which commands run one after the other, on files of its own.

    What a command leaves running goes on until the sandbox is closed, or a later one hits its
    time limit.
    """

    @property
    def limits(self) -> SandboxLimits:
        """Return what programs may take."""
        ...

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        time_s: float | None = None,
    ) -> Finished:
        """Run a command; `Finished` says how it ended.

        Args:
            command: The program, found on the sandbox's PATH, and its arguments.
            stdin: What it reads; then the end of the file.
            cwd: A folder of the sandbox; None: its home.
            env: Variables beside the sandbox's own.
            time_s: Seconds; None: `SandboxLimits.time_s`.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED when the sandbox failed.
            PolicyFault: An earlier command has ended the sandbox.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Return a file of the sandbox; relative paths start at its home.

        Raises:
            FileNotFoundError: There is none, it is larger than `SandboxLimits.file_mb`, or no file.
            AstraflowError: ENVIRONMENT_FAILED when the sandbox failed.
            PolicyFault: A command has ended the sandbox.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the sandbox, with its folders.

        Raises:
            OSError: It cannot be written there.
            AstraflowError: ENVIRONMENT_FAILED when the sandbox failed.
            PolicyFault: A command has ended the sandbox.
        """
        ...

    async def close(self) -> None:
        """End it and all that runs in it; idempotent."""
        ...


class SandboxProvider(Protocol):
    """Starts sandboxes of one kind: what `sandbox` of a recipe names, made from its `Options`."""

    async def start(self) -> Sandbox:
        """Start a sandbox.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED when it cannot start here; says why.
        """
        ...

    async def close(self) -> None:
        """Give back what all its sandboxes shared; idempotent."""
        ...
