"""The emulator in user space: for kernels without netem."""

import subprocess
import tempfile
from pathlib import Path
from typing import Final, Protocol

from link.counters import Counts, Flow
from link.hosts import DEVICE, Host
from link.needs import LinkUnavailableError, command
from link.profiles import Profile

_SOURCE: Final = Path(__file__).with_name("emulator.c")


class Line(Protocol):
    """What carries packets between two hosts."""

    def shape(self, profile: Profile) -> None:
        """Be like this from now on."""
        ...

    def count(self) -> Counts:
        """Return what has been carried."""
        ...

    def close(self) -> None:
        """Carry nothing any more."""
        ...


class EmulatedLine:
    """A process that carries packets between two TUN devices."""

    def __init__(self, near: Host, far: Host, *, offload: bool) -> None:
        """Compile and start it.

        Args:
            near: Gets a device.
            far: Gets a device.
            offload: Whether TCP packets travel in batches (see emulator.c).

        Raises:
            LinkUnavailableError: When it cannot start.
        """
        with tempfile.TemporaryDirectory(prefix="aflink-") as folder:
            program = f"{folder}/emulator"
            command("cc", "-O2", "-pthread", "-o", program, str(_SOURCE))
            mode = "offload" if offload else "plain"
            self._process = subprocess.Popen(
                [program, near.namespace, far.namespace, DEVICE, mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._expect("ready")

    def shape(self, profile: Profile) -> None:
        """Be like this from now on; what is under way arrives as planned."""
        rest = (
            f"{profile.mbit_per_s * 1e6} {round(profile.rtt_ms / 2 * 1e6)} {profile.loss}"
            f" {round(profile.room_ms * 1e6)}"
        )
        for direction in (0, 1):
            self._ask(f"set {direction} {rest}")
            self._expect("ok")

    def count(self) -> Counts:
        """Return what has been carried."""
        return Counts(to_far=self._count(0), to_near=self._count(1))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _count(self, direction: int) -> Flow:
        self._ask(f"count {direction}")
        packets, nbytes, dropped = map(int, self._answer().split())
        return Flow(packets=packets, nbytes=nbytes, dropped=dropped)

    def _ask(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def _expect(self, answer: str) -> None:
        said = self._answer()
        if said != answer:
            self._process.kill()
            _, errors = self._process.communicate()
            raise LinkUnavailableError(f"the emulator said {said!r}: {errors.strip()}")
