"""A trainer's weight sender, as a receiver sees it."""

import asyncio
from dataclasses import dataclass
from typing import Any, Self, cast

import httpx
import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.gateway.legacy.plan import BufferPlan, read_plan
from astraflow.gateway.legacy.receiver import Receiver, receiving

_CALL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What a sender can send now.

    Attributes:
        version: Of its weights.
        delta_base: Version that its delta changes; None: it has none.
        delta_nbytes: Of its delta.
    """

    version: int
    delta_base: int | None = None
    delta_nbytes: int = 0


class SenderClient:
    """Asks one sender; every call raises SOURCE_UNREACHABLE, SOURCE_TIMEOUT or what it answers."""

    def __init__(self, endpoint: str, *, host: str, timeout_s: float) -> None:
        """Prepare.

        Args:
            endpoint: host:port.
            host: Under which it dials back.
            timeout_s: For a transfer.
        """
        self.endpoint = endpoint
        self._host = host
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(base_url=f"http://{endpoint}", timeout=_CALL_S)

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def plan(self) -> BufferPlan:
        """Return what its buffer holds."""
        return read_plan(await self._call("GET", "/get_buffer_info"))

    async def offered(self) -> Offered:
        """Return what it can send."""
        fields = await self._call("GET", "/get_capabilities")
        version = _number(fields, "version")
        if not fields.get("delta_ready") or fields.get("delta_version") != version:
            return Offered(version=version)
        return Offered(
            version=version,
            delta_base=_number(fields, "delta_base_version"),
            delta_nbytes=_number(fields, "delta_size_bytes"),
        )

    async def fetch(self, buffer: np.ndarray, mode: str) -> tuple[int, int]:
        """Have a transfer pushed into a buffer.

        Args:
            buffer: u8[n], from whose start on it comes.
            mode: full or delta.

        Returns:
            The version that the sender says it sent, and how many bytes came.
        """
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                receiving(buffer, self._host) as receiver,
            ):
                instance = await self._register(receiver, len(buffer))
                fields = await self._call(
                    "POST", "/request_transfer", {"instance_id": instance, "mode": mode}
                )
                if not fields.get("ok"):
                    why = fields.get("reason") or fields.get("error")
                    raise AstraflowError(Reason.SOURCE_UNREACHABLE, f"no {mode} transfer: {why}")
                await receiver.ended()
                return _number(fields, "version"), receiver.nbytes
        except TimeoutError:
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT,
                f"the {mode} transfer from {self.endpoint} took more than {self._timeout_s:g} s",
            ) from None

    async def _register(self, receiver: Receiver, nbytes: int) -> str:
        """Say where pushes go; addresses count from 0, so that they are offsets."""
        await self._call(
            "POST",
            "/register_sglang_instance",
            {
                "sglang_http_host": self._host,
                "sglang_http_port": receiver.port,
                "session_ids": [f"{self._host}:{receiver.port}"],
                "buffer_ptr": 0,
                "buffer_length": nbytes,
                "zmq_endpoint": self._host,
                "zmq_port": receiver.message_port,
                "handshake_ports": [],
                "sender_group_index": 0,
            },
        )
        return f"{self._host}:{receiver.port}"

    async def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        timeout = self._timeout_s if path == "/request_transfer" else _CALL_S
        try:
            answer = await self._http.request(method, path, json=body, timeout=timeout)
            fields = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE, f"the sender at {self.endpoint}: {error!r}"
            ) from error
        if answer.is_error or not isinstance(fields, dict):
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE, f"the sender at {self.endpoint}{path} says {fields}"
            )
        return cast("dict[str, Any]", fields)


def _number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise AstraflowError(
            Reason.SOURCE_UNREACHABLE, f"the sender's {name} is {value!r}, which is no number"
        )
    return value
