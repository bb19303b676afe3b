"""Limits and timings that both ends of a connection agree on."""

from typing import Final

MAX_MESSAGE_NBYTES: Final = 64 * 2**20
"""Largest payload of one message."""

# Room for what wraps a payload of the largest size: ids, names, lengths.
_ENVELOPE_NBYTES: Final = 2**20

# A silent connection is asked after 20 s and given up 10 s later. The server must allow what
# the client does, or it closes the connection with "too many pings".
_KEEPALIVE_MS: Final = 20_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000

PING_INTERVAL_OPTION: Final = "grpc.http2.min_ping_interval_without_data_ms"
"""How far apart a server wants pings; gRPC ignores a name that it does not know."""

COMMON_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES + _ENVELOPE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES + _ENVELOPE_NBYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *COMMON_OPTIONS,
    (PING_INTERVAL_OPTION, _KEEPALIVE_MS // 4),
    # Otherwise a second server on the same port binds too and takes half of the calls.
    ("grpc.so_reuseport", 0),
)
