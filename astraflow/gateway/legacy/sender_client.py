"""A trainer's weight sender, as a receiver sees it."""

import asyncio
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.gateway.legacy.plan import BufferPlan, read_plan
from astraflow.gateway.legacy.receiver import Receiver, receiving
from astraflow.rpc.peers import DialRules, Peer
from astraflow.rpc.reading import JSON_NBYTES, off_loop

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


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

    def __init__(self, endpoint: str, *, host: str, timeout_s: float, dial: DialRules) -> None:
        """Prepare.

        Args:
            endpoint: host:port.
            host: Under which it dials back.
            timeout_s: For a transfer.
            dial: Who may be dialled.
        """
        self.endpoint = endpoint
        self._host = host
        self._timeout_s = timeout_s
        self._port = 0
        self._peer = Peer(f"http://{endpoint}", dial)

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close its connections."""
        await self._peer.__aexit__()

    async def plan(self) -> BufferPlan:
        """Return what its buffer holds."""
        fields = await self._peer.ask_json("GET", "/get_buffer_info", max_nbytes=JSON_NBYTES)
        return await off_loop(read_plan, fields, self._peer.dial.max_weights_nbytes)

    async def offered(self) -> Offered:
        """Return what it can send."""
        fields = await self._peer.ask_json("GET", "/get_capabilities")
        version = _number(fields, "version")
        if not fields.get("delta_ready") or fields.get("delta_version") != version:
            return Offered(version=version)
        return Offered(
            version=version,
            delta_base=_number(fields, "delta_base_version"),
            delta_nbytes=_number(fields, "delta_size_bytes"),
        )

    async def fetch(self, buffer: np.ndarray, mode: str, nbytes: int) -> tuple[int, int]:
        """Have a transfer pushed into a buffer.

        Args:
            buffer: u8[n], from whose start on it comes.
            mode: full or delta.
            nbytes: Of the full weights: published senders take no receiver with another number,
                for a delta neither.

        Returns:
            The version that the sender says it sent, and how many bytes came.
        """
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                receiving(buffer, self._host) as receiver,
            ):
                instance = await self._register(receiver, nbytes)
                asked = {"instance_id": instance, "mode": mode}
                fields = await self._peer.ask_json(
                    "POST", "/request_transfer", asked, timeout_s=self._timeout_s
                )
                if not fields.get("ok"):
                    # Whoever named it is told that it refuses; what it says is for this log.
                    said = str(fields.get("reason") or fields.get("error"))[:300]
                    log.warning(
                        "a sender refuses a transfer", sender=self.endpoint, mode=mode, why=said
                    )
                    why = f"the sender at {self.endpoint} refuses a {mode} transfer"
                    raise AstraflowError(Reason.SOURCE_UNREACHABLE, why)
                await receiver.ended()
                return _number(fields, "version"), receiver.nbytes
        except TimeoutError:
            raise AstraflowError(
                Reason.SOURCE_TIMEOUT,
                f"the {mode} transfer from {self.endpoint} took more than {self._timeout_s:g} s",
            ) from None

    async def _register(self, receiver: Receiver, nbytes: int) -> str:
        """Say where pushes go; addresses count from 0, so that they are offsets.

        The name stays: published senders keep a socket for every one that they ever heard.
        """
        self._port = self._port or receiver.port
        await self._peer.ask_json(
            "POST",
            "/register_sglang_instance",
            {
                "sglang_http_host": self._host,
                "sglang_http_port": self._port,
                "session_ids": [f"{self._host}:{receiver.port}"],
                "buffer_ptr": 0,
                "buffer_length": nbytes,
                "zmq_endpoint": self._host,
                "zmq_port": receiver.message_port,
                "handshake_ports": [],
                "sender_group_index": 0,
            },
        )
        return f"{self._host}:{self._port}"


def _number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise AstraflowError(Reason.SOURCE_UNREACHABLE, f"the sender says no number of {name}")
    return value
