"""Containers, by the command line of podman or docker; the image needs a `python3`."""

import uuid

from pydantic import Field

from astraflow.core.errors import AstraflowError
from astraflow.workflows.sandbox.channel import GUEST, GuestPlace, GuestSandbox, cannot_start
from astraflow.workflows.sandbox.protocol import SandboxLimits

_HOME = "/tmp"  # noqa: S108 - of the container
_USER = 1000


class Podman:
    """Starts containers with podman.

    They have no network, no capabilities, and write to nothing but folders in memory.
    """

    program = "podman"

    class Options(SandboxLimits):
        """The image, and how it is run."""

        image: str
        """It has to be on the node: nothing is pulled."""
        folders: tuple[str, ...] = ()
        """Empty folders beside /tmp that can be written, such as /app; each takes `disk_mb`."""
        env: dict[str, str] = Field(default={})
        """Variables of commands, beside PATH, HOME and LANG."""
        arguments: tuple[str, ...] = ()
        """More of `run`, such as `--runtime=runc` or `--volume=/data:/data:ro`."""
        client_arguments: tuple[str, ...] = ()
        """Of the program itself, before `run`, such as `--cgroup-manager=cgroupfs`."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def start(self) -> GuestSandbox:
        """Start a container; see `SandboxProvider.start`."""
        options = self._options
        name = f"astraflow-{uuid.uuid4().hex}"
        client = (self.program, *options.client_arguments)
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": _HOME, "LANG": "C.UTF-8"}
        place = GuestPlace(
            home=_HOME,
            env=env | options.env,
            task_count=options.processes + 2,
            beside="containers",
            is_seen=False,
            is_namespace=False,
            kill_command=(*client, "rm", "--force", name),
        )
        disk = f"rw,exec,nosuid,nodev,size={options.disk_mb}m,mode=1777"
        bounds = (
            *(f"--memory={options.memory_mb}m", f"--memory-swap={options.memory_mb}m"),
            *(f"--pids-limit={options.processes + 8}", "--ulimit=nofile=256:256"),
            *("--network=none", "--cap-drop=all", "--security-opt=no-new-privileges"),
            *("--read-only", f"--user={_USER}:{_USER}", f"--workdir={_HOME}"),
            *(f"--tmpfs={folder}:{disk}" for folder in (_HOME, *options.folders)),
        )
        code = GUEST.read_text(encoding="utf-8")
        guest = ("python3", "-I", "-S", "-X", "utf8", "-c", code)
        run = ("run", "--interactive", "--rm", "--pull=never", f"--name={name}")
        command = (*client, *run, *bounds, *options.arguments, options.image, *guest)
        try:
            return await GuestSandbox.start(command, limits=options, place=place)
        except AstraflowError as error:
            raise cannot_start(
                f"{error.message.removeprefix('no sandbox starts here: ')}; does `{self.program} "
                f"run --rm {options.image} python3 -V` work on this node?"
            ) from error

    async def close(self) -> None:
        """Do nothing: containers share nothing."""


class Docker(Podman):
    """Starts containers with docker."""

    program = "docker"
