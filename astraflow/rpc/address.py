"""Addresses: what a server listens on and how others dial it."""

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from astraflow.core.errors import AstraflowError, Reason

# TEST-NET-1 (RFC 5737), and 2001:db8::/32 (RFC 3849) for hosts that have IPv6 alone: connecting a
# UDP socket sends nothing; the kernel only picks a route.
_OUTSIDE: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_LOOPBACK: Final = "127.0.0.1"
_MAX_PORT: Final = 65535
_ANY: Final = ("0.0.0.0", "::", "*")  # noqa: S104 - compared with, not bound to


def split_address(address: str, field: str = "address") -> tuple[str, int]:
    """Return host and port of `host:port` or `[ipv6]:port`.

    Raises:
        AstraflowError: INVALID_FIELD when it is neither.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    is_sound = port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT
    if not (colon and host and is_sound) or (":" in host and not bracketed):
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{field}: '{address}' is not host:port, such as 127.0.0.1:7070 or [::1]:7070",
            metadata={"field": field},
        )
    return host[1:-1] if bracketed else host, int(port)


def split_addresses(addresses: str, field: str = "address") -> list[tuple[str, int]]:
    """Return hosts and ports of addresses with commas between them."""
    return [split_address(address.strip(), field) for address in addresses.split(",")]


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and reached from nowhere else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unproxied(variables: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return the variables by which programs reach hosts, and this machine, without its proxy.

    Where `http_proxy` is set, as on many clusters, they would ask it for their own loopback.
    """
    known = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    if known != "*":
        known = ",".join(dict.fromkeys(filter(None, (known, _LOOPBACK, "localhost", *hosts))))
    return {"no_proxy": known, "NO_PROXY": known}


def advertised(host: str, port: int, advertise: str | None = None) -> str:
    """Return how others dial a server.

    Args:
        host: What it listens on.
        port: What it listens on, never 0.
        advertise: `auto`: the IP of the interface that leads outside; `fqdn`: the full name of
            this machine; else a host or IP, with or without a port of its own (behind a port
            map), or several host:port with commas between them, of which this is one. None: as
            listened on, or as `auto` when it listens on all interfaces.

    Raises:
        AstraflowError: INVALID_FIELD when this machine has no full name, or one of several is not
            host:port.
    """
    match advertise:
        case None:
            return join_address(outside_ip() if host in _ANY else host, port)
        case "auto":
            return join_address(outside_ip(), port)
        case "fqdn":
            return join_address(_full_name(), port)
        case given if "," in given:
            return ",".join(join_address(*each) for each in split_addresses(given, "advertise"))
        case given if given.rpartition("]")[2].startswith(":") or given.count(":") == 1:
            return given
        case given:
            return join_address(given.strip("[]"), port)


def outside_ip() -> str:
    """Return the IP from which packets leave this machine; loopback when none can."""
    for family, place in _OUTSIDE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((place, 9))
            return str(probe.getsockname()[0])
    return _LOOPBACK


def _full_name() -> str:
    name = socket.getfqdn()
    if "." not in name or name.startswith("localhost"):
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"advertise: this machine has no full name ('{name}'); use auto, or a host or IP",
            metadata={"field": "advertise"},
        )
    return name
