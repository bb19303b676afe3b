"""Peers that the gateway dials: hosts of a list, and answers that are bounded before they are read.

An answer is taken as it comes on the wire and not beyond its bound. One that is compressed or leads
elsewhere is refused, and nothing of its content stands in an error: whoever named the peer would
read through the gateway what it cannot reach itself.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, Final, Self, TypeVar, cast
from urllib.parse import urlsplit

import httpx
from fastapi import Request

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import is_loopback, join_address
from astraflow.rpc.reading import JSON_NBYTES, ReadBudget, read, read_json

SMALL_NBYTES: Final = 1 << 20
"""Of answers that say how a peer stands."""

_CALL_S: Final = 30.0

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class DialRules:
    """Who may be dialled, and what may come of it.

    Attributes:
        hosts: Names, addresses and networks (10.0.0.0/8). A name stands for all of its addresses;
            other ones of this machine count as 127.0.0.1.
        max_answer_nbytes: Of one answer.
        room: What of them is in memory.
        max_weights_nbytes: Of the buffer that a weight sender names; nothing is allocated before.
        clear_weights: Whether weights may travel between hosts in the clear.
    """

    hosts: tuple[str, ...] = ("127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
    max_answer_nbytes: int = 128 << 20
    room: ReadBudget = field(default_factory=ReadBudget)
    max_weights_nbytes: int = 1 << 40
    clear_weights: bool = True

    def also(self, caller: str | None) -> "DialRules":
        """Return these, with the host that a request came from; None: from nowhere known."""
        return self if caller is None else replace(self, hosts=(*self.hosts, caller))

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return where a host is dialled.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE for a name without an address, INVALID_FIELD for a
                host that is not on the list.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise _unreachable(f"{host}:{port} has no address") from None
        known = list(dict.fromkeys(str(each[4][0]) for each in found))
        allowed = known if host in self.hosts else [each for each in known if self._has(each)]
        if not allowed:
            why = f"{host}:{port} may not be dialled from here; http.dial lists what may"
            raise AstraflowError(Reason.INVALID_FIELD, why, metadata={"field": "http.dial"})
        return allowed

    async def require_weights(self, host: str, port: int) -> str:
        """Return where weights are taken to or from in the clear.

        Raises:
            AstraflowError: As `addresses`; INVALID_FIELD for another host where they must not be.
        """
        address, *_ = await self.addresses(host, port)
        if not (self.clear_weights or is_loopback(address) or _is_outer(address)):
            why = (
                f"{host}:{port} is another host, this run has TLS, and the published protocol"
                " carries weights in the clear; http.clear_weights lets it"
            )
            raise AstraflowError(
                Reason.INVALID_FIELD, why, metadata={"field": "http.clear_weights"}
            )
        return address

    def _has(self, address: str) -> bool:
        given = ip_address("127.0.0.1" if _is_outer(address) else address)
        if isinstance(given, IPv6Address):
            given = given.ipv4_mapped or given
        return any(given in network for network in map(_network, self.hosts) if network is not None)


def _is_outer(address: str) -> bool:
    """Whether an address is one of this machine, beside its loopback."""
    given = ip_address(address)
    if given.is_loopback or given.is_unspecified or given.is_multicast:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _network(host: str) -> Any:
    """Return a network, or the one address that it is; None: a name."""
    try:
        return ip_network(host, strict=False)
    except ValueError:
        return None


class Peer:
    """One peer; every call raises SOURCE_UNREACHABLE, SOURCE_TIMEOUT, MESSAGE_TOO_LARGE."""

    def __init__(self, url: str, dial: DialRules, *, retries: int = 0) -> None:
        """Dial nothing. Retries are of a connection that does not come about."""
        self.url = url.rstrip("/")
        self.dial = dial
        parts = urlsplit(self.url)
        self._scheme, self._netloc, self._path = parts.scheme, parts.netloc, parts.path
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._scheme == "https" else 80)
        # A proxy of the environment would dial whom it likes.
        again = httpx.AsyncHTTPTransport(
            retries=retries,
            trust_env=False,
            verify=_authorities() if parts.scheme == "https" else False,
        )
        self._http = httpx.AsyncClient(transport=again, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask_json(
        self,
        method: str,
        path: str,
        fields: Any = None,
        *,
        timeout_s: float = _CALL_S,
        max_nbytes: int = SMALL_NBYTES,
    ) -> dict[str, Any]:
        """Return the dict that a peer answers."""
        body = None if fields is None else json.dumps(fields).encode()
        status, raw = await self.ask(
            method, path, body, timeout_s=timeout_s, max_nbytes=min(max_nbytes, JSON_NBYTES)
        )
        return await self._read(path, status, raw, lambda found: found)

    async def get_parsed(
        self, path: str, parse: Callable[[dict[str, Any]], Value], *, max_nbytes: int
    ) -> Value:
        """Return what a pure function makes of the dict that a peer answers."""
        status, raw = await self.ask("GET", path, max_nbytes=min(max_nbytes, JSON_NBYTES))
        return await self._read(path, status, raw, parse)

    async def _read(
        self, path: str, status: int, raw: bytearray, parse: Callable[[dict[str, Any]], Value]
    ) -> Value:
        if status // 100 != 2:
            raise _unreachable(f"{self.url}{path} answers with status {status}")

        def reader(raw: bytearray) -> Value:
            try:
                found = read_json(raw)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise _unreachable(f"{self.url}{path} answers what is no dict of JSON")
            return parse(cast("dict[str, Any]", found))

        return await read(reader, raw)

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        kind: str = "application/json",
        timeout_s: float = _CALL_S,
        max_nbytes: int | None = None,
    ) -> tuple[int, bytearray]:
        """Return the status that a peer answers with, and the body as it came."""
        headers = {"host": self._netloc, "accept-encoding": "identity"}
        if body is not None:
            headers["content-type"] = kind
        bound = self.dial.max_answer_nbytes if max_nbytes is None else max_nbytes
        asked = self._http.build_request(
            method,
            "http://unset",
            content=body,
            headers=headers,
            timeout=None,  # the caller's is for all of it
            extensions={"sni_hostname": self._host},
        )
        try:
            async with asyncio.timeout(timeout_s):
                *others, last = await self.dial.addresses(self._host, self._port)
                for address in others:
                    with suppress(httpx.ConnectError):
                        return await self._sent(asked, address, path, bound)
                return await self._sent(asked, last, path, bound)
        except TimeoutError:
            why = f"{self.url}{path} took more than {timeout_s:g} s"
            raise AstraflowError(Reason.SOURCE_TIMEOUT, why, retryable=True) from None
        except httpx.HTTPError as error:
            # Its text may be what the peer said.
            raise _unreachable(f"{self.url}{path}: {type(error).__name__}") from None

    async def _sent(
        self, asked: httpx.Request, address: str, path: str, bound: int
    ) -> tuple[int, bytearray]:
        """Ask at one address, and take no more than the bound."""
        where = join_address(address, self._port)
        asked.url = httpx.URL(f"{self._scheme}://{where}{self._path}{path}")
        answer = await self._http.send(asked, stream=True)
        held, room = 0, self.dial.room
        try:
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise _unreachable(f"{self.url}{path} compresses what was asked for as it is")
            if answer.is_redirect:
                raise _unreachable(f"{self.url}{path} leads elsewhere, which is not followed")
            too_large = AstraflowError(
                Reason.MESSAGE_TOO_LARGE, f"{self.url}{path} answers more than {bound} bytes"
            )
            if int(answer.headers.get("content-length", 0)) > bound:
                raise too_large
            raw, count = bytearray(), 0
            async for part in answer.aiter_raw():
                if len(raw) + len(part) > bound:
                    raise too_large
                held = room.reserve(
                    address, held, len(raw) + len(part), self.dial.max_answer_nbytes
                )
                raw += part
                count += 1
                if count > 4096 + len(raw) // 64:
                    raise _unreachable(f"{self.url}{path} answers in crumbs")
                # Parts that are here already come without a wait.
                await asyncio.sleep(0)
            return answer.status_code, raw
        finally:
            room.release(address, held)
            await answer.aclose()


@cache
def _authorities() -> ssl.SSLContext:
    """Return whom callers of https trust; they are read once, which takes a while."""
    return ssl.create_default_context()


def caller_of(request: Request) -> str | None:
    """Return the host that a request came from; None: it is not known."""
    return None if request.client is None else request.client.host


def _unreachable(why: str) -> AstraflowError:
    return AstraflowError(Reason.SOURCE_UNREACHABLE, why, retryable=True)
