"""Profiles: what a link is like."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a link is like; the same in both directions.

    Attributes:
        name: In tables.
        mbit_per_s: Rate of IP packets, 10^6 bits per second.
        rtt_ms: Round trip time of an empty link; each direction takes half.
        loss: Share of the packets that get lost at random, [0, 1).
        queue_ms: How long a packet can wait at the narrow place; what comes when it is full is
            dropped. None: a round trip, the rule of thumb for routers (RFC 3439, section 4).
        mtu: Largest IP packet, bytes.
    """

    name: str
    mbit_per_s: float
    rtt_ms: float
    loss: float = 0.0
    queue_ms: float | None = None
    mtu: int = 1500

    @property
    def in_flight_nbytes(self) -> int:
        """Bandwidth-delay product: what is under way on a busy link."""
        return int(self.mbit_per_s * 1e6 / 8 * self.rtt_ms / 1e3)

    @property
    def room_ms(self) -> float:
        """The queue, whichever way it was told."""
        return self.rtt_ms if self.queue_ms is None else self.queue_ms

    def ideal_s(self, nbytes: int) -> float:
        """Return the least seconds from asking for so many bytes to having them."""
        return nbytes * 8 / (self.mbit_per_s * 1e6) + self.rtt_ms / 1e3


PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile(name="100mbit-100ms", mbit_per_s=100, rtt_ms=100),
        Profile(name="1gbit-300ms", mbit_per_s=1000, rtt_ms=300),
        Profile(name="1gbit-100ms-loss", mbit_per_s=1000, rtt_ms=100, loss=0.001),
        Profile(name="4gbit-300ms", mbit_per_s=4000, rtt_ms=300),
    )
}
