"""The bar of a pull: bytes, speed, and how long it will take, on standard error."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layout_frame import LayoutFrame


class PullBar:
    """Shows what a puller tells of one version.

    Attributes:
        progress: What is drawn; its one task counts bytes of payload.
    """

    def __init__(self, what: str, *, is_quiet: bool) -> None:
        """Prepare.

        Args:
            what: Is pulled.
            is_quiet: Show nothing.
        """
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=is_quiet,
        )
        self._task = self.progress.add_task(f"pulling {what}", total=None)
        self._incoming: IncomingVersion | None = None

    def shown(self) -> Progress:
        """Return what shows it while it is entered."""
        return self.progress

    def begin(self, incoming: IncomingVersion, frame: LayoutFrame) -> None:
        """Take note of a pull that begins."""
        del frame
        self._incoming = incoming

    def note(self) -> None:
        """Show what has come."""
        incoming = self._incoming
        if incoming is None:
            return
        left = incoming.left_nbytes
        total = None if left is None else incoming.nbytes + left
        self.progress.update(self._task, completed=incoming.nbytes, total=total)
