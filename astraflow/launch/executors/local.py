"""Processes of this machine; they end with the one that started them."""

import os
import signal
from collections.abc import Callable

from astraflow.launch.processes import RoleCommand, RoleProcess


class LocalExecutor:
    """Starts processes here."""

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
        """Start a process.

        Args:
            command: What to start.
            on_line: Told of each line of its standard output, which goes to the log as well.
        """
        return await RoleProcess.start(
            command, lifeline=self._lifeline, orphan_signal=self._orphan_signal, on_line=on_line
        )

    async def sweep(self) -> None:
        """Nothing is left: processes end with the one that started them."""

    async def close(self) -> None:
        os.close(self._keep)
        os.close(self._lifeline)
