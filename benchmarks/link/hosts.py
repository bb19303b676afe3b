"""Hosts: network namespaces, and processes in them."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from link.needs import LinkUnavailableError, command, ip

DEVICE: Final = "wan0"
_PREFIX: Final = "aflink-"
_NAME: Final = re.compile(rf"^{_PREFIX}(?P<pid>\d+)-\d+-(near|far)$")
_TERM_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One end of a link.

    Attributes:
        namespace: Of the network.
        address: IPv4, as the other end dials it.
    """

    namespace: str
    address: str

    def run(self, words: Sequence[str], *, check: bool = True) -> str:
        """Run a process here to its end; return what it printed."""
        done = subprocess.run(self.command(words), check=check, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process here; options of `subprocess.Popen`. It ends with the link."""
        return subprocess.Popen(self.command(words), **options)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a process here."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def settings(self, names: Sequence[str]) -> dict[str, str]:
        """Return settings of the kernel (sysctl names) as they are here."""
        found = command(*self.command(["sysctl", *names]))
        lines = (line.split(" = ", 1) for line in found.splitlines())
        return {name: " ".join(value.split()) for name, value in lines}

    def change(self, settings: Mapping[str, str]) -> None:
        """Change settings of the kernel here; other namespaces keep theirs."""
        pairs = [f"{name}={value}" for name, value in settings.items()]
        if pairs:
            command(*self.command(["sysctl", "-qw", *pairs]))


def make_host(*, number: int, end: str, address: str) -> Host:
    """Make a namespace that is known to belong to this process.

    Raises:
        LinkUnavailableError: When the system refuses.
    """
    host = Host(namespace=f"{_PREFIX}{os.getpid()}-{number}-{end}", address=address)
    ip("netns", "add", host.namespace)
    ip("-n", host.namespace, "link", "set", "lo", "up")
    return host


def bring_up(host: Host, *, mtu: int) -> None:
    """Give the device of a host its address."""
    ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", DEVICE)
    ip(
        *("-n", host.namespace, "link", "set", DEVICE),
        *("mtu", str(mtu), "txqueuelen", "20000", "up"),
    )


def remove_host(namespace: str) -> None:
    """End the processes in a namespace, then remove it; nothing happens where there is none."""
    with suppress(LinkUnavailableError):
        end_processes(namespace)
        ip("netns", "del", namespace)


def end_processes(namespace: str) -> None:
    """Ask all processes in a namespace to end, and kill those that do not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _TERM_S
        for pid in _pids(namespace):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        while _pids(namespace) and time.monotonic() < deadline:
            time.sleep(0.02)


def remove_stale() -> list[str]:
    """Remove what processes left behind that could not clean up; return the namespaces."""
    names = [line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()]
    stale = [name for name in names if _is_stale(name)]
    for name in stale:
        remove_host(name)
    return stale


def _is_stale(namespace: str) -> bool:
    match = _NAME.match(namespace)
    if match is None:
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    return False


def _pids(namespace: str) -> list[int]:
    """Return processes in a namespace that are not only waiting to be collected."""
    found = map(int, ip("netns", "pids", namespace).split())
    return [pid for pid in found if pid != os.getpid() and not _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
