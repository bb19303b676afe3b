"""The kernel's own emulator: a pair of devices with `tc netem` at both ends."""

import json
from typing import Any

from link.counters import Counts, Flow
from link.hosts import DEVICE, Host
from link.needs import command, ip
from link.profiles import Profile


class NetemLine:
    """A veth pair; each end delays, paces and loses what leaves it."""

    def __init__(self, near: Host, far: Host) -> None:
        """Make the devices.

        Raises:
            LinkUnavailableError: When the system refuses.
        """
        self._near, self._far = near, far
        ip(
            *("link", "add", DEVICE, "netns", near.namespace, "type", "veth"),
            *("peer", "name", DEVICE, "netns", far.namespace),
        )
        for host in (near, far):
            # netem delays, loses and counts a batch of packets as if it was one.
            ip("-n", host.namespace, "link", "set", DEVICE, "gso_max_segs", "1")

    def shape(self, profile: Profile) -> None:
        """Be like this from now on."""
        # netem counts what is on its way among what waits, in packets.
        waiting_ms = profile.rtt_ms / 2 + profile.room_ms
        limit = max(10, int(profile.mbit_per_s * 1e3 / 8 * waiting_ms / profile.mtu))
        for host in (self._near, self._far):
            command(
                *("tc", "-n", host.namespace, "qdisc", "replace", "dev", DEVICE, "root", "netem"),
                *("delay", f"{profile.rtt_ms / 2}ms", "rate", f"{profile.mbit_per_s}mbit"),
                *("loss", "random", f"{profile.loss * 100}%", "limit", str(limit)),
            )

    def count(self) -> Counts:
        """Return what has been carried."""
        return Counts(to_far=_flow(self._near), to_near=_flow(self._far))

    def close(self) -> None:
        """Return; the devices go with their namespaces."""


def _flow(host: Host) -> Flow:
    told = command("tc", "-s", "-j", "-n", host.namespace, "qdisc", "show", "dev", DEVICE)
    (qdisc,) = (each for each in json.loads(told) if each["kind"] == "netem")
    counts: dict[str, Any] = qdisc
    return Flow(packets=counts["packets"], nbytes=counts["bytes"], dropped=counts["drops"])
