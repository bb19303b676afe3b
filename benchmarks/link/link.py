"""Link: two hosts on this machine, far from each other."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Final, Self

from link.counters import Counts
from link.emulator import EmulatedLine, Line
from link.hosts import Host, bring_up, make_host, remove_host, remove_stale
from link.needs import has_netem, require_link
from link.netem import NetemLine
from link.profiles import Profile

SHOWN: Final = (
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_slow_start_after_idle",
    "net.ipv4.tcp_congestion_control",
)

_ENDS: Final = {"near": "10.77.0.1", "far": "10.77.0.2"}
_numbers = count()


class Link:
    """Two network namespaces, joined by a link like a profile.

    It removes them at the end, with the processes in them; what a killed process left behind
    goes when the next link is made.
    """

    def __init__(self, profile: Profile, *, tuned: bool = False, offload: bool = True) -> None:
        """Prepare; `with` makes it.

        Args:
            profile: What it is like.
            tuned: Whether both hosts get the settings of the kernel that `tuning` tells; else
                they are as the kernel has them.
            offload: Whether the emulator carries TCP in batches, as network cards do (faster by
                an order of magnitude); netem does what the kernel does.
        """
        self.profile = profile
        self._tuned = tuned
        self._offload = offload
        self._line: Line | None = None
        self._hosts: tuple[Host, ...] = ()
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        """Make it.

        Raises:
            LinkUnavailableError: Naming what this machine lacks.
        """
        require_link()
        remove_stale()
        with ExitStack() as exits:
            self._hosts = self._make_hosts(exits)
            self._line = self._make_line(exits)
            for host in self._hosts:
                bring_up(host, mtu=self.profile.mtu)
                host.change(tuning(self.profile) if self._tuned else {})
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove it."""
        self.close()

    @property
    def near(self) -> Host:
        """One end."""
        assert self._hosts, "use `with Link(...)`"
        return self._hosts[0]

    @property
    def far(self) -> Host:
        """The other end."""
        assert self._hosts, "use `with Link(...)`"
        return self._hosts[1]

    def count(self) -> Counts:
        """Return what has crossed it."""
        assert self._line, "use `with Link(...)`"
        return self._line.count()

    def change(
        self,
        *,
        mbit_per_s: float | None = None,
        rtt_ms: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Change what it is like while it carries packets; None: stays."""
        assert self._line, "use `with Link(...)`"
        given = {"mbit_per_s": mbit_per_s, "rtt_ms": rtt_ms, "loss": loss}
        news = {name: value for name, value in given.items() if value is not None}
        self.profile = replace(self.profile, **news)
        self._line.shape(self.profile)

    def settings(self) -> dict[str, str]:
        """Return the settings of TCP at the near end."""
        return self.near.settings(SHOWN)

    def close(self) -> None:
        """End the processes at both ends and remove them; idempotent."""
        self._exits.close()
        self._hosts, self._line = (), None

    def _make_hosts(self, exits: ExitStack) -> tuple[Host, ...]:
        number = next(_numbers)
        hosts: list[Host] = []
        for end, address in _ENDS.items():
            host = make_host(number=number, end=end, address=address)
            exits.callback(remove_host, host.namespace)
            hosts.append(host)
        return tuple(hosts)

    def _make_line(self, exits: ExitStack) -> Line:
        near, far = self._hosts
        if has_netem():
            line: Line = NetemLine(near, far)
        else:
            line = EmulatedLine(near, far, offload=self._offload)
        exits.callback(line.close)
        line.shape(self.profile)
        return line


def tuning(profile: Profile) -> dict[str, str]:
    """Return settings of the kernel for a long link: windows of four times what is under way.

    Windows are half of the buffers (tcp_adv_win_scale), so 2 x the bandwidth-delay product is the
    least; a loss or a full queue needs room beside.
    """
    nbytes = max(16 << 20, 4 * profile.in_flight_nbytes)
    return {
        "net.ipv4.tcp_rmem": f"4096 131072 {nbytes}",
        "net.ipv4.tcp_wmem": f"4096 65536 {nbytes}",
        "net.ipv4.tcp_slow_start_after_idle": "0",
        "net.ipv4.tcp_congestion_control": "bbr",
    }
