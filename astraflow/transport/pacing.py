"""Pacing: many connections of one group together send no faster than their way carries.

Each connection finds its own rate, and all of them at once find too much: after a silence they
would overrun the narrow place with what each believes to have alone, and pay for it with round
trips of repeats. So after a transfer that lost more than chance takes, the group's rate is
bounded by what arrived; transfers without such losses move the bound up again.
"""

import socket
import struct
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

# linux/tcp.h, struct tcp_info: total_retrans, segs_out, delivery_rate (bytes per second).
_TCP_INFO: Final = struct.Struct("=100xI32xI20xQ")
_SO_MAX_PACING_RATE: Final = 47
_NO_BOUND: Final = 0xFFFF_FFFF

# Above it packets were dropped for want of room: ten times what a bad line loses by chance.
_CROWDED_SHARE: Final = 0.01
_HEADROOM: Final = 1.25
_RISE: Final = 1.1
_MEMORY: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What connections have sent.

    Attributes:
        packet_count: Since they stand.
        repeat_count: Of these, that had to be sent again.
        bytes_per_s: At which they delivered of late.
    """

    packet_count: int = 0
    repeat_count: int = 0
    bytes_per_s: int = 0


def measure(connections: Collection[socket.socket]) -> Sent:
    """Return what the kernel knows; zeros where it tells nothing."""
    rows = [_info(each) for each in connections]
    return Sent(
        packet_count=sum(row[1] for row in rows),
        repeat_count=sum(row[0] for row in rows),
        bytes_per_s=sum(row[2] for row in rows),
    )


class Pacer:
    """Bounds the rate of a group from transfer to transfer."""

    def __init__(self) -> None:
        self._before = Sent()
        self._rates: deque[int] = deque(maxlen=_MEMORY)
        self._bound: float | None = None

    def adjust(self, connections: Collection[socket.socket]) -> None:
        """Set the bound for the next transfer, from what the last one met."""
        now, before = measure(connections), self._before
        self._before = now
        self._rates.append(now.bytes_per_s)
        self._bound = next_bound(before, now, max(self._rates), self._bound)
        if self._bound is not None:
            for each in connections:
                _bound(each, int(self._bound / len(connections)))


def next_bound(before: Sent, now: Sent, best: float, bound: float | None) -> float | None:
    """Return the bytes per second that a group may send next; None: as many as it can.

    `best` is the most that it delivered in any of its last transfers.

    After 1,000 packets of which 20 were sent again, and 100 MB/s at best: 125 MB/s. After
    1,000 of which 1 was: 10 % more than the bound before.
    """
    packets = now.packet_count - before.packet_count
    repeats = now.repeat_count - before.repeat_count
    if before.packet_count and repeats > packets * _CROWDED_SHARE:
        return best * _HEADROOM
    return None if bound is None else bound * _RISE


def _info(connection: socket.socket) -> tuple[int, int, int]:
    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (OSError, AttributeError):
        return 0, 0, 0
    return _TCP_INFO.unpack(data) if len(data) == _TCP_INFO.size else (0, 0, 0)


def _bound(connection: socket.socket, bytes_per_s: int) -> None:
    with suppress(OSError):
        rate = min(max(bytes_per_s, 1), _NO_BOUND)
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
