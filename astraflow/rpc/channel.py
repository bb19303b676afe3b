"""Channels: how a peer is dialled, with limits and timings that both ends agree on."""

import os
import socket
from typing import Final

import grpc
import grpc.aio

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import is_loopback, join_address, split_addresses
from astraflow.rpc.tls import Tls, channel_credentials

MAX_MESSAGE_NBYTES: Final = 64 * 2**20

"""Largest payload of one message."""

# Room for what wraps a payload of the largest size: ids, names, lengths.
_ENVELOPE_NBYTES: Final = 2**20

# A silent connection is asked after 20 s and given up 10 s later. The server must allow what
# the client does, or it closes the connection with "too many pings".
_KEEPALIVE_MS: Final = 20_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000
_ANSWER_OPTION: Final = "grpc.max_receive_message_length"
PING_INTERVAL_OPTION: Final = "grpc.http2.min_ping_interval_without_data_ms"

"""How far apart a server wants pings; gRPC ignores a name that it does not know."""

COMMON_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES + _ENVELOPE_NBYTES),
    (_ANSWER_OPTION, MAX_MESSAGE_NBYTES + _ENVELOPE_NBYTES),
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

_CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    *COMMON_OPTIONS,
    # A peer that restarts is found again soon: the defaults wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: what one attempt may take. A first round trip can take half a second.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Two channels to one address are two connections: bulk must not delay a KeepAlive.
    ("grpc.use_local_subchannel_pool", 1),
)


# One of several addresses that falls silent is left for the next one after 10 s; the server allows
# a ping every 5 s.
_SEVERAL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    *(each for each in _CHANNEL_OPTIONS if not each[0].startswith("grpc.keepalive_time")),
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    # Proxies are for one name.
    ("grpc.enable_http_proxy", 0),
)


def dial_from_thread(address: str, *, tls: Tls | None = None) -> grpc.Channel:
    """Return a channel whose calls block: for a thread that no event loop may be needed for."""
    target, options = _target(address)
    if tls is None or tls.is_plain:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, channel_credentials(tls), options=options)


def dial(
    address: str, *, tls: Tls | None = None, max_answer_nbytes: int | None = None
) -> grpc.aio.Channel:
    """Return a channel to a peer; the first call connects.

    It repeats no call that the peer may have seen: who calls knows what a repeat needs, such as
    joining again before a stream.

    Args:
        address: host:port; several with commas between them are tried in turn, whenever there is
            no connection. With TLS, all must show a certificate of the first one's host.
        tls: None or all unset: plain text.
        max_answer_nbytes: Of one message that comes; a larger one ends its call. None:
            `MAX_MESSAGE_NBYTES`.

    Raises:
        AstraflowError: INVALID_FIELD for an address without a port, one of several whose name is
            unknown, or an unreadable PEM file.
    """
    target, options = _target(address)
    if max_answer_nbytes is not None:
        bound = (_ANSWER_OPTION, max_answer_nbytes + _ENVELOPE_NBYTES)
        options = (*(each for each in options if each[0] != _ANSWER_OPTION), bound)
    if tls is None or tls.is_plain:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, channel_credentials(tls), options=options)


def proxy_of(address: str) -> str:
    """Return the variable of the environment whose proxy an address is dialled through.

    Empty: there is none. gRPC leaves out hosts that `no_proxy` names.
    """
    (host, _), *others = split_addresses(address)
    names = () if others or is_loopback(host) else ("grpc_proxy", "https_proxy", "http_proxy")
    return next((each for each in names if os.environ.get(each)), "")


def _target(address: str) -> tuple[str, tuple[tuple[str, int | str], ...]]:
    """Return what gRPC calls an address, and its options."""
    places = split_addresses(address)
    if len(places) == 1:
        # A proxy of the environment cannot reach this machine's own loopback.
        is_outside = not is_loopback(places[0][0])
        return address, (*_CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(is_outside)))
    host = places[0][0]
    names = (
        ("grpc.default_authority", join_address(*places[0])),
        ("grpc.ssl_target_name_override", host),
    )
    return _resolved(address, places), (*_SEVERAL_OPTIONS, *names)


def _resolved(address: str, places: list[tuple[str, int]]) -> str:
    """Return a target of several places; gRPC takes numbers of one family there."""
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        try:
            found = [
                join_address(str(socket.getaddrinfo(host, port, family)[0][4][0]), port)
                for host, port in places
            ]
        except OSError:
            continue
        return f"{scheme}:{','.join(found)}"
    raise AstraflowError(
        Reason.INVALID_FIELD,
        f"address: the hosts of {address} have neither an IPv4 address each nor an IPv6 address",
        metadata={"field": "address"},
    )
