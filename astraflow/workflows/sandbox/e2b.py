"""E2B: virtual machines of a service, or of one's own that speaks its protocol (package `e2b`)."""

import importlib
import posixpath
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.sandbox.channel import cannot_start
from astraflow.workflows.sandbox.protocol import Finished, SandboxLimits

_LATE_S = 30.0
# Of `timeout`, and of a shell whose command was killed.
_TIMED_OUT, _SIGNAL_CODES = 124, range(129, 193)
_KILLED = (_TIMED_OUT, 137)


class E2B:
    """Starts virtual machines; the key is E2B_API_KEY of the node's environment."""

    class Options(SandboxLimits):
        """Limits, and which machine; `disk_mb` is the template's."""

        template: str | None = None
        """Unset: the service's own, which has Python."""
        env: dict[str, str] = Field(default={})
        """Variables of commands."""
        life_s: int = Field(default=600, ge=10)
        """Seconds after which the service ends a machine, whatever became of its node."""
        allow_internet: bool = False
        """Whether programs reach the Internet."""
        connection: dict[str, str] = Field(default={})
        """Such as `domain` or `api_url` of a service of one's own."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def start(self) -> "E2BSandbox":
        """Start a machine; see `SandboxProvider.start`."""
        try:
            module: Any = importlib.import_module("e2b")
        except ImportError as error:
            raise cannot_start("pip install e2b on every node") from error
        options = self._options
        try:
            machine = await module.AsyncSandbox.create(
                template=options.template,
                timeout=options.life_s,
                envs=options.env,
                allow_internet_access=options.allow_internet,
                **options.connection,
            )
        except Exception as error:  # its own and those of HTTP have no common base
            raise cannot_start(f"e2b: {type(error).__name__}: {error}") from error
        return E2BSandbox(module, machine, options)

    async def close(self) -> None:
        """Do nothing: machines share nothing."""


class E2BSandbox:
    """A virtual machine. Input and output of a command go through files, for they are bytes."""

    def __init__(self, module: Any, machine: Any, limits: SandboxLimits) -> None:
        """Take over a machine; `E2B.start` is the way to get one."""
        self._module = module
        self._machine = machine
        self.limits = limits

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        time_s: float | None = None,
    ) -> Finished:
        """Run a command; see `Sandbox.exec`."""
        limits, time_s = self.limits, time_s or self.limits.time_s
        base = f"/tmp/.astraflow-{uuid.uuid4().hex}"  # noqa: S108 - of the machine
        await self.write(f"{base}.in", stdin)
        # What is read is gone before the command begins; a larger output is a larger file.
        script = (
            f"exec 3<{base}.in; rm {base}.in; ulimit -c 0; ulimit -f {limits.file_mb * 1024}; "
            f"ulimit -v {limits.memory_mb * 1024}; ulimit -u {limits.processes + 32}; "
            f"timeout -s KILL {time_s} {shlex.join(command)} <&3 3<&- >{base}.out 2>{base}.err"
        )
        began = time.monotonic()
        code = await self._run(script, cwd=cwd, env=env, time_s=time_s)
        is_timeout = code in _KILLED and time.monotonic() - began >= time_s
        if is_timeout:
            # All that is the user's, this shell too; what runs the machine is root's.
            await self._run("kill -KILL -1", cwd=None, env=None, time_s=_LATE_S)
        most = int(limits.output_mb * 2**20)
        stdout, stderr = await self.read(f"{base}.out"), await self.read(f"{base}.err")
        signal = 9 if is_timeout else code - 128 if code in _SIGNAL_CODES else None
        return Finished(
            exit_code=None if signal else code,
            signal=signal,
            stdout=stdout[:most],
            stderr=stderr[:most],
            is_timeout=is_timeout,
            is_truncated=max(len(stdout), len(stderr)) > most,
        )

    async def read(self, path: str) -> bytes:
        """Return a file; see `Sandbox.read`."""
        try:
            return bytes(await self._machine.files.read(path, format="bytes"))
        except self._module.NotFoundException as error:
            raise FileNotFoundError(f"{path}: {error}") from error
        except self._module.SandboxException as error:
            raise self._failed(error) from error

    async def write(self, path: str, data: bytes) -> None:
        """Write a file; see `Sandbox.write`."""
        try:
            await self._machine.files.write(path, data)
        except self._module.InvalidArgumentException as error:
            raise OSError(f"{posixpath.basename(path)}: {error}") from error
        except self._module.SandboxException as error:
            raise self._failed(error) from error

    async def close(self) -> None:
        """End the machine; see `Sandbox.close`."""
        try:
            await self._machine.kill()
        except self._module.NotFoundException:
            return

    async def _run(
        self, script: str, *, cwd: str | None, env: Mapping[str, str] | None, time_s: float
    ) -> int:
        """Run a shell script, and return its exit code."""
        try:
            await self._machine.commands.run(
                script, cwd=cwd, envs=dict(env or {}), timeout=time_s + _LATE_S
            )
        except self._module.CommandExitException as error:
            return int(error.exit_code)
        except self._module.TimeoutException:
            return _TIMED_OUT
        except self._module.SandboxException as error:
            raise self._failed(error) from error
        return 0

    def _failed(self, error: Exception) -> AstraflowError:
        return AstraflowError(
            Reason.ENVIRONMENT_FAILED,
            f"e2b machine {self._machine.sandbox_id}: {type(error).__name__}: {error}",
            retryable=True,
        )
