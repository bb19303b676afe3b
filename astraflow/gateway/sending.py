"""Weights to receivers of the published lane: versions laid out flat, offered over JSON, pushed."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import zmq
import zmq.asyncio
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.exceptions import HTTPException

from astraflow import __version__
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import WeightUpdate
from astraflow.core.versions import VersionInfo
from astraflow.gateway.http import BodyRules, Fields, add_errors, body_of, read_body
from astraflow.gateway.weight_buffer import PUSH_ACK, PUSH_HEAD, BufferPlan, encode_delta
from astraflow.rpc.address import join_address
from astraflow.rpc.http import json_answer
from astraflow.rpc.peers import DialRules, caller_of
from astraflow.rpc.tls import Tls
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.wire.fields import invalid

_STREAMS = 4
_MOST_PORTS = 64
_LEAST_NBYTES = 1 << 20
_LINGER_MS = 5000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldVersion:
    """One version; nobody writes to it, so a transfer is never torn.

    Attributes:
        flat: u8[nbytes].
        delta: u8[...], from the version before; None: there is none.
    """

    version: int
    plan: BufferPlan
    flat: np.ndarray
    delta: np.ndarray | None = None
    changed_count: int = 0


class FlatVersions:
    """Pulls versions as any member does, and lays them out for existing receivers."""

    def __init__(self, policy_id: PolicyId, *, tls: Tls | None = None) -> None:
        self._newest: HeldVersion | None = None
        self._puller = WeightPuller(policy_id, tls=tls)
        self._one_at_a_time = asyncio.Lock()

    async def get(
        self,
        target: VersionInfo,
        listed: Callable[[], Awaitable[Iterable[VersionInfo]]],
        transfer_token: bytes,
    ) -> HeldVersion:
        """Return a version, or a newer one that is here; `listed` asks for those of the run."""
        async with self._one_at_a_time:
            if self._newest is None or self._newest.version < target.version:
                known = {info.version: info for info in await listed()}
                pulled = await self._puller.pull(target, known, transfer_token, listed=listed)
                self._newest = await asyncio.to_thread(self._laid_out, pulled.update)
            return self._newest

    async def close(self) -> None:
        await self._puller.close()

    def _laid_out(self, update: WeightUpdate) -> HeldVersion:
        """Return a version with the delta from the one before, where one can be."""
        base = self._newest
        if update.base_version is None or base is None or base.version != update.base_version:
            update = self._puller.full_update()
            specs = [each.spec for each in update.tensors]
            plan = BufferPlan.of([(spec.name, spec.dtype, spec.shape) for spec in specs])
            flat = np.zeros(plan.nbytes, np.uint8)
        else:
            plan, flat = base.plan, base.flat.copy()
        plan.write(flat, update.tensors)
        held = HeldVersion(version=update.version, plan=plan, flat=flat)
        is_next = base is not None and base.version == held.version - 1 and base.plan == plan
        if base is None or not is_next or not plan.has_deltas:
            return held
        delta, count = encode_delta(base.flat.view(np.uint16), flat.view(np.uint16))
        return replace(held, delta=delta, changed_count=count) if len(delta) < len(flat) else held


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SenderOffer:
    """A version under the number that one receiver knows it by.

    Attributes:
        number: What the receiver is told; it counts from 1.
        base: The number of what `held.delta` changes; None: the receiver does not hold that.
    """

    held: HeldVersion
    number: int
    base: int | None = None

    @property
    def delta(self) -> np.ndarray | None:
        """What the receiver can apply to what it holds, u8[...]."""
        return None if self.base is None else self.held.delta


@dataclass(slots=True)
class Sender:
    """What one receiver is served: the version that it was told of, until it is told of another.

    Attributes:
        pushed: The number of the last version of which the receiver acknowledged every byte; None:
            of none.
    """

    policy_id: PolicyId
    offer: SenderOffer | None = None
    pushed: int | None = None

    def require(self) -> SenderOffer:
        """Return what is served."""
        if self.offer is None:
            raise AstraflowError(Reason.NOT_READY, "no version has come yet; ask again")
        return self.offer


class Instance(Fields):
    """A receiver, as it registers."""

    sglang_http_host: str
    sglang_http_port: int = Field(ge=0, lt=1 << 16)
    session_ids: list[str] = Field(
        min_length=1, max_length=_MOST_PORTS, description="host:port[:port ...] of its pushes."
    )
    buffer_ptr: int = Field(default=0, description="Not used: pushes name offsets.")
    buffer_length: int = Field(ge=0)
    zmq_endpoint: str = Field(description="Host, or tcp://host[:port], of its completion message.")
    zmq_port: int = Field(ge=0, lt=1 << 16)
    handshake_ports: tuple[int, ...] = Field(default=(), strict=False)
    sender_group_index: int = 0

    @property
    def instance_id(self) -> str:
        """What /request_transfer names."""
        return f"{self.sglang_http_host}:{self.sglang_http_port}"

    async def target(self, dial: DialRules) -> "Target":
        """Return where it is dialled.

        Raises:
            AstraflowError: INVALID_FIELD for an address that is none or that may not be dialled,
                SOURCE_UNREACHABLE for a name without one.
        """
        pushes: list[tuple[str, int]] = []
        for session in self.session_ids:
            host, *ports = session.split(":")
            pushes += [await _resolved("session_ids", host, port, dial) for port in ports or [""]]
        if len(pushes) > _MOST_PORTS:
            raise invalid("session_ids", f"{len(pushes)} ports are more than {_MOST_PORTS}")
        host, _, port = self.zmq_endpoint.removeprefix("tcp://").partition(":")
        message = await _resolved("zmq_endpoint", host, port or str(self.zmq_port), dial)
        return Target(name=self.instance_id, pushes=tuple(pushes), message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a receiver is dialled: addresses that were looked up and allowed, and ports."""

    name: str
    pushes: tuple[tuple[str, int], ...]
    message: tuple[str, int]


async def _resolved(field: str, host: str, port: str, dial: DialRules) -> tuple[str, int]:
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise invalid(field, f"port {port[:20]!r} of {host[:200]} is none")
    return await dial.require_weights(host, int(port)), int(port)


class Pusher:
    """Sends transfers; one ZMQ context serves all.

    Attributes:
        receivers: By policy and instance id. A receiver registers once, with the first sender that
            it is told of, and pulls from every later one.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.receivers: dict[tuple[PolicyId, str], Target] = {}
        self._timeout_s = timeout_s
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def send(self, target: Target, payload: np.ndarray) -> None:
        """Push all of a payload, u8[n], over parallel streams, and say that it is there.

        Nothing is said of one that failed: the receiver, which has the answer to its request, would
        take the message for that of its next transfer.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE, SOURCE_TIMEOUT.
        """
        ports = target.pushes
        count = max(1, min(_STREAMS * len(ports), len(payload) // _LEAST_NBYTES))
        edges = [len(payload) * i // count for i in range(count + 1)]
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                for i in range(count):
                    part = payload[edges[i] : edges[i + 1]].data
                    group.create_task(_push(ports[i % len(ports)], edges[i], part))
        except TimeoutError:
            why = f"a transfer took more than {self._timeout_s:g} s"
            raise AstraflowError(Reason.SOURCE_TIMEOUT, why) from None
        except BaseExceptionGroup as errors:
            why = f"{target.name} took no transfer: {errors.exceptions[0]}"
            raise AstraflowError(Reason.SOURCE_UNREACHABLE, why) from None
        messages: Any = self._context.socket(zmq.PUSH)
        with messages:
            messages.setsockopt(zmq.LINGER, _LINGER_MS)
            messages.setsockopt(zmq.IPV6, 1)
            messages.connect(f"tcp://{join_address(*target.message)}")
            await messages.send_multipart([b"0", b"0"])


async def _push(address: tuple[str, int], offset: int, payload: memoryview) -> None:
    """Push one stream; OSError where the receiver does not say that it has everything."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(connection, address)
        await loop.sock_sendall(connection, PUSH_HEAD.pack(offset, len(payload)))
        await loop.sock_sendall(connection, payload)
        if await loop.sock_recv(connection, 1) != PUSH_ACK:
            raise ConnectionError(f"{address[0]}:{address[1]} did not acknowledge a push")


class RequestTransfer(Fields):
    """A receiver wants weights."""

    instance_id: str = Field(description="host:port that it registered as sglang_http.")
    mode: Literal["full", "delta"] = "full"


# Nobody has more RaaS; strangers may not fill the memory with names.
_MOST_RECEIVERS = 4096


def sender_app(sender: Sender, pusher: Pusher, rules: BodyRules, dial: DialRules) -> FastAPI:
    """Return the app of one sender."""
    app = FastAPI(title="astraflow gateway: weight sender", version=__version__)
    add_errors(app)
    sending = asyncio.Lock()

    @app.get("/get_version")
    async def get_version() -> Response:
        """Return the version that is sent."""
        return json_answer({"version": sender.require().number})

    @app.get("/get_buffer_info")
    async def get_buffer_info() -> Response:
        """Return the tensors in the order in which they are sent; 503 before there are any."""
        return json_answer(sender.require().held.plan.to_json())

    @app.get("/get_capabilities")
    async def get_capabilities() -> Response:
        """Return what can be sent: always all weights, and the delta from the version before."""
        offer = sender.require()
        known = {"strategies": ["full", "delta"], "version": offer.number}
        if offer.delta is None:
            return json_answer(known | {"delta_ready": False})
        delta = {
            "delta_ready": True,
            "delta_base_version": offer.base,
            "delta_version": offer.number,
            "delta_sparsity": _sparsity(offer),
            "delta_num_nonzero": offer.held.changed_count,
            "delta_size_bytes": len(offer.delta),
        }
        return json_answer(known | delta)

    @app.post("/register_sglang_instance", openapi_extra=body_of(Instance))
    async def register_sglang_instance(request: Request) -> Response:
        """Register a receiver: where pushes and the completion message go."""
        instance = await read_body(request, rules, Instance)
        target = await instance.target(dial.also(caller_of(request)))
        nbytes = sender.require().held.plan.nbytes
        if instance.buffer_length != nbytes:
            why = f"the weights take {nbytes} bytes, the buffer has {instance.buffer_length}"
            raise HTTPException(422, f"buffer_length: {why}")
        key = sender.policy_id, instance.instance_id
        if len(pusher.receivers) >= _MOST_RECEIVERS and key not in pusher.receivers:
            raise HTTPException(409, f"{_MOST_RECEIVERS} receivers are registered already")
        pusher.receivers[key] = target
        return json_answer(
            {
                "trainer_global_rank": 0,
                "trainer_world_size": 1,
                # Receivers ask again until this is not empty; they use it for nothing else.
                "trainer_session_ids": [[sender.policy_id]],
                "trainer_buffer_ptr": 0,
                "trainer_buffer_length": nbytes,
                "trainer_hostname": "",
                "trainer_rpc_port": 0,
            }
        )

    @app.post("/request_transfer", openapi_extra=body_of(RequestTransfer))
    async def request_transfer(request: Request) -> Response:
        """Push weights to a receiver; answers once it has acknowledged every byte."""
        asked = await read_body(request, rules, RequestTransfer)
        # Names of a receiver in answers of published ones have the scheme.
        instance_id = asked.instance_id.removeprefix("http://")
        target = pusher.receivers.get((sender.policy_id, instance_id))
        if target is None:
            why = f"{instance_id} is not registered: POST /register_sglang_instance"
            raise HTTPException(404, why)
        async with sending:
            return json_answer(await _transfer(sender, target, asked.mode, pusher))

    return app


async def _transfer(sender: Sender, target: Target, mode: str, pusher: Pusher) -> dict[str, Any]:
    offer = sender.require()
    payload = offer.held.flat if mode == "full" else offer.delta
    if payload is None:
        why = f"version {offer.number} has no delta from what this receiver holds"
        return {"ok": False, "fallback": "full", "reason": why}
    try:
        await pusher.send(target, payload)
    except AstraflowError as error:
        return {"ok": False, "error": error.message}
    sender.pushed = offer.number
    answer: dict[str, Any] = {"ok": True, "version": offer.number, "mode": mode}
    if mode == "full":
        return answer
    return answer | {
        "delta_base_version": offer.base,
        "delta_size": len(payload),
        "sparsity": _sparsity(offer),
        "num_nonzero": offer.held.changed_count,
        "compute_time": 0.0,
    }


def _sparsity(offer: SenderOffer) -> float:
    return 1.0 - offer.held.changed_count / max(1, offer.held.plan.nbytes // 2)
