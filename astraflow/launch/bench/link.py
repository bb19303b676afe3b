"""`astraflow bench link`: how fast weights come over a link, the same bytes over every lane."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import LaneKind
from astraflow.launch.processes import AS_MODULE, LIFELINE, hold_lifeline
from astraflow.launch.weights import print_json
from astraflow.telemetry.logging import configure_logging
from astraflow.transport.lanes import RECEIVED_NBYTES, Lanes
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer
from astraflow.wire.transfers import TransferPlan, TransferSpec
from astraflow.wire.weights import SentChunk, digest_of

POLICY = PolicyId("bench")

VERSION = 0


@contextmanager
def serve_link(
    nbytes: int, *, listen: str, advertise: str | None, lanes: Sequence[LaneKind] | None
) -> Generator[tuple[str, str]]:
    """Serve one version of random bytes; yield where, and a token that lets in who knows it.

    Args:
        nbytes: Of the version, which no codec makes smaller; twice as many are in memory.
        listen: host:port; port 0 takes a free one.
        advertise: How the other end dials it: auto, fqdn, a host or IP; None: as listened on.
        lanes: Served beside gRPC; None: shared memory and TCP.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there.
    """
    publisher = WeightPublisher(POLICY, Layout.of([("w", Dtype.U8, (nbytes,))]))
    publisher.publish(VERSION, {"w": np.random.default_rng().integers(0, 256, nbytes, np.uint8)})
    token = secrets.token_urlsafe(16)
    with WeightServer(publisher, listen=listen, advertise=advertise, lanes=lanes) as server:
        server.set_transfer_token(token.encode())
        yield server.endpoint, token


_SPEC = TransferSpec(policy_id=POLICY, version=VERSION)

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRate:
    """What one lane carried.

    Attributes:
        lane: Which.
        first_gb_per_s: Of the first pull, which makes the connections.
        gb_per_s: Median of the pulls after it, over connections that stand.
        best_gb_per_s: Of these.
        cpu_s_per_gb: Of this process, median.
        first_byte_s: From the request to the first chunk, median of the pulls after the first.
    """

    lane: LaneKind
    first_gb_per_s: float
    gb_per_s: float
    best_gb_per_s: float
    cpu_s_per_gb: float
    first_byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pull:
    nbytes: int
    wall_s: float
    cpu_s: float
    first_byte_s: float


async def measure_link(
    endpoint: str, token: str, lanes: Sequence[LaneKind], *, rounds: int
) -> tuple[LaneRate, ...]:
    """Pull over each lane in turn, once to connect and then `rounds` times.

    Turns meet the same load of the link and the machine. Chunks of the first pull are verified.

    Args:
        endpoint: host:port of the other end.
        token: That lets in.
        lanes: Which; those that cannot be had here are left out.
        rounds: At least 1.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE, TOKEN_INVALID and what else the source answers;
            DIGEST_MISMATCH for a chunk that arrived with other bytes; LANE_UNAVAILABLE when no
            lane is left.
    """
    clients = {lane: Lanes(lanes=[lane]) for lane in lanes}
    pulls: dict[LaneKind, list[_Pull]] = {}
    try:
        for lane, client in clients.items():
            before = RECEIVED_NBYTES[lane]
            pull = await _pull(client, endpoint, token, is_verified=True)
            # Else gRPC took the place of the lane.
            if RECEIVED_NBYTES[lane] - before == pull.nbytes:
                pulls[lane] = [pull]
        for _ in range(rounds):
            for lane, done in pulls.items():
                done.append(await _pull(clients[lane], endpoint, token, is_verified=False))
    finally:
        for client in clients.values():
            await client.close()
    if not pulls:
        raise AstraflowError(
            Reason.LANE_UNAVAILABLE, f"none of {', '.join(lanes)} reaches {endpoint}"
        )
    return tuple(_rate(lane, done) for lane, done in pulls.items())


async def _pull(client: Lanes, endpoint: str, token: str, *, is_verified: bool) -> _Pull:
    nbytes, digests, first_byte_s = 0, (), 0.0
    started, cpu_s = time.perf_counter(), time.process_time()
    async with aclosing(client.pull(endpoint, _SPEC, token.encode())) as items:
        async for item in items:
            if isinstance(item, TransferPlan):
                digests = item.patches[0].chunk_digests
            elif isinstance(item, SentChunk):
                first_byte_s = first_byte_s or time.perf_counter() - started
                nbytes += len(item.chunk.payload)
                index = item.chunk.header.index
                if is_verified and digest_of(item.chunk) != digests[index]:
                    why = f"chunk {index} arrived with other bytes"
                    raise AstraflowError(Reason.DIGEST_MISMATCH, why)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    return _Pull(nbytes=nbytes, wall_s=wall_s, cpu_s=cpu_s, first_byte_s=first_byte_s)


def _rate(lane: LaneKind, pulls: Sequence[_Pull]) -> LaneRate:
    first, *rest = pulls
    rates = [each.nbytes / each.wall_s / _GB for each in rest]
    return LaneRate(
        lane=lane,
        first_gb_per_s=first.nbytes / first.wall_s / _GB,
        gb_per_s=median(rates),
        best_gb_per_s=max(rates),
        cpu_s_per_gb=median(each.cpu_s * _GB / each.nbytes for each in rest),
        first_byte_s=median(each.first_byte_s for each in rest),
    )


def _possible() -> list[LaneKind]:
    """Return the lanes that both ends may have here, gRPC last."""
    ucx = [LaneKind.UCX] if find_spec("ucxx") is not None else []
    return [LaneKind.SHM, LaneKind.TCP, *ucx, LaneKind.GRPC]


def serve(nbytes: int, *, listen: str, advertise: str | None, as_json: bool) -> None:
    """Be the end that serves, until interrupted.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there.
    """
    configure_logging("bench")
    hold_lifeline(first=signal.SIGINT)
    with serve_link(nbytes, listen=listen, advertise=advertise, lanes=_possible()[:-1]) as source:
        endpoint, token = source
        if as_json:
            print_json({"endpoint": endpoint, "token": token})
        else:
            command = f"astraflow bench link --from {endpoint} --token {token}"
            print(f"serving {nbytes / 1e6:,.0f} MB; run on the other machine:\n  {command}")  # noqa: T201
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def pull_there(
    endpoint: str, token: str, *, lanes: Sequence[LaneKind] | None, rounds: int, as_json: bool
) -> None:
    """Be the end that pulls, and print what each lane carried.

    Raises:
        AstraflowError: See `measure_link`; INVALID_FIELD without a token.
    """
    if not token:
        raise AstraflowError(Reason.INVALID_FIELD, "give --token, which the serving end printed")
    configure_logging("bench")
    rates = asyncio.run(measure_link(endpoint, token, lanes or _possible(), rounds=rounds))
    if as_json:
        print_json([asdict(rate) for rate in rates])
    else:
        Console().print(_table(rates))


def read_source(lines: Iterable[str]) -> tuple[str, str]:
    """Return endpoint and token from what the serving end prints; anything else may go before.

    Raises:
        AstraflowError: NOT_READY when they are not there.
    """
    for line in lines:
        with suppress(ValueError):
            match json.loads(line):
                case {"endpoint": str(endpoint), "token": str(token)}:
                    return endpoint, token
                case _:
                    pass
    raise AstraflowError(Reason.NOT_READY, "the serving end did not start: see what it printed")


def pull_here(nbytes: int, *, lanes: Sequence[LaneKind] | None, rounds: int, as_json: bool) -> None:
    """Start the serving end as a process of this machine, and pull from it.

    Raises:
        AstraflowError: See `measure_link`; NOT_READY when the serving end does not start.
    """
    lifeline, held = os.pipe()
    arguments = ("bench", "link", "--listen", "127.0.0.1:0", "--mb", str(nbytes // 1_000_000))
    with subprocess.Popen(  # noqa: S603 - this very program
        [sys.executable, *AS_MODULE, *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, LIFELINE: str(lifeline)},
        pass_fds=(lifeline,),
    ) as process:
        os.close(lifeline)
        try:
            endpoint, token = read_source(process.stdout or ())
            pull_there(endpoint, token, lanes=lanes, rounds=rounds, as_json=as_json)
        finally:
            # It ends with this process, and with this.
            os.close(held)


def _table(rates: Sequence[LaneRate]) -> Table:
    table = Table("lane", "first pull", "then", "best", "first byte", "CPU of this end")
    for rate in rates:
        speeds = (rate.first_gb_per_s, rate.gb_per_s, rate.best_gb_per_s)
        table.add_row(
            rate.lane,
            *(f"{each * 8:.2f} Gbit/s" for each in speeds),
            f"{rate.first_byte_s * 1e3:.0f} ms",
            f"{rate.cpu_s_per_gb:.2f} s/GB",
        )
    return table
