"""No sandbox at all: processes of the node's own user, within limits.

They read and write what the node does, and reach the network. For programs that are trusted, on
machines where nothing better starts; that is why a recipe has to say `unsafe_process`.
"""

import os
import sys

from pydantic import Field

from astraflow.workflows.kept.program import ProgramFolder, environment
from astraflow.workflows.sandbox.channel import GUEST, GuestPlace, GuestSandbox
from astraflow.workflows.sandbox.protocol import SandboxLimits


class UnsafeProcess:
    """Starts processes under a guest in a temporary folder."""

    class Options(SandboxLimits):
        """Limits: `disk_mb` is not kept, and for root neither is `processes`."""

        env: dict[str, str] = Field(default={})
        """Variables of commands, beside PATH, HOME and LANG."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def start(self) -> GuestSandbox:
        """Start one; see `SandboxProvider.start`."""
        folder = ProgramFolder(prefix="astraflow-process-")
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder.name, "LANG": "C.UTF-8"}
        place = GuestPlace(
            home=folder.name,
            env=env | self._options.env,
            task_count=self._options.processes,
            beside="all",
            is_seen=True,
            is_namespace=False,
            on_close=folder.cleanup,
        )
        # Imported, not run: so it is compiled once.
        code = f"import sys; sys.path.insert(0, {str(GUEST.parent)!r}); import guest; guest.main()"
        command = (sys.executable, "-I", "-S", "-X", "utf8", "-c", code)
        return await GuestSandbox.start(
            command, limits=self._options, place=place, env=environment({})
        )

    async def close(self) -> None:
        """Do nothing: they share nothing."""
