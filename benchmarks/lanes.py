"""Measure the lanes against each other on one host: a source and a puller, each in its process.

Chunks of 4 MiB of random bytes, as a whole version would be sent raw. Every round pulls once over
each lane, so that all of them meet the same load of the machine; the first round, in which
connections are made and memory is touched for the first time, is told apart. Payloads are compared
with what was sent in the first round.

    python benchmarks/lanes.py --nbytes 1000000000 --rounds 7 --out lanes.json
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from blake3 import blake3

from astraflow.codec.chunks import CHUNK_NBYTES, Chunk, ChunkHeader, Encoding
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype
from astraflow.core.versions import CodecProfile, LaneKind, PatchInfo
from astraflow.rpc.server import Servicer, start_server
from astraflow.transport.groups import Transfers
from astraflow.transport.grpc_lane import encode_response
from astraflow.transport.hosts import LaneHosts
from astraflow.transport.lanes import RECEIVED_NBYTES, Lanes
from astraflow.wire.transfers import SentItem, TransferPlan, TransferSpec, encode_lane_endpoint
from astraflow.wire.weights import PatchIndex, SentChunk
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)

SECRET = b"benchmark"
SPEC = TransferSpec(policy_id=PolicyId("benchmark"), version=0)
GB = 1e9
TELLING = "result "


def main() -> None:
    arguments = _arguments()
    if arguments.role == "source":
        asyncio.run(_serve(arguments.nbytes, arguments.seed))
    elif arguments.role == "puller":
        asyncio.run(_pull(arguments))
    else:
        _compare(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=int, default=1_000_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", nargs="+", default=["grpc", "tcp", "shm", "ucx"])
    parser.add_argument("--out")
    parser.add_argument("--role", choices=["source", "puller"], help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    return parser.parse_args()


def _compare(arguments: argparse.Namespace) -> None:
    """Start both ends and tell what they measured."""
    same = ["--nbytes", str(arguments.nbytes), "--seed", str(arguments.seed)]
    with _started("--role", "source", *same) as source:
        endpoint = _told(source)
        with _started(
            *("--role", "puller", "--endpoint", endpoint, "--rounds", str(arguments.rounds)),
            *(*same, "--lanes", *arguments.lanes),
        ) as puller:
            rows = _told(puller)
    report = {"nbytes": arguments.nbytes, "cores": os.cpu_count(), "lanes": rows}
    text = json.dumps(report | {"times_grpc": _ratios(rows)}, indent=2)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n")
    print(text)


def _ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    base = rows.get("grpc", {}).get("median_gb_per_s")
    return {
        lane: round(row["median_gb_per_s"] / base, 2)
        for lane, row in rows.items()
        if base and "median_gb_per_s" in row
    }


@contextmanager
def _started(*arguments: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, str(Path(__file__)), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _told(process: "subprocess.Popen[str]") -> Any:
    """Return what a process told: the first line of its output that is no log."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(TELLING):
            return json.loads(line.removeprefix(TELLING))
        print(line, end="", file=sys.stderr)
    raise SystemExit("an end of the transfer failed")


def _tell(what: object) -> None:
    print(TELLING + json.dumps(what), flush=True)


class _Transfer:
    """All chunks of the benchmark."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        nbytes = sum(len(each.payload) for each in chunks)
        patch = PatchInfo(
            base_version=None,
            version=0,
            profile=CodecProfile.FAST,
            codec_version=1,
            root_digest=bytes(32),
            chunk_count=len(chunks),
            payload_nbytes=nbytes,
        )
        index = PatchIndex(patch=patch, chunk_digests=(bytes(32),) * len(chunks))
        self.plan = TransferPlan(
            patches=(index,),
            chunk_count=len(chunks),
            payload_nbytes=nbytes,
        )

    async def items(self) -> AsyncGenerator[SentItem]:
        yield self.plan
        for chunk in self._chunks:
            yield SentChunk(patch_index=0, chunk=chunk)

    def close(self) -> None:
        """Nothing is held."""


class _Source:
    """The smallest TransferService that has all lanes."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self.hosts = LaneHosts(Transfers(open=self.open, secrets=lambda: [SECRET]))

    def open(self, spec: TransferSpec) -> _Transfer:
        del spec
        return _Transfer(self._chunks)

    async def ListLanes(  # noqa: N802 - named by the contract
        self, request: pb.ListLanesRequest, context: Any
    ) -> pb.ListLanesResponse:
        del request, context
        return pb.ListLanesResponse(endpoints=map(encode_lane_endpoint, self.hosts.endpoints))

    async def Pull(  # noqa: N802 - named by the contract
        self, request: pb.PullRequest, context: Any
    ) -> AsyncGenerator[pb.PullResponse]:
        del request, context
        transfer = _Transfer(self._chunks)
        async for item in transfer.items():
            yield encode_response(item)


def _chunks(nbytes: int, seed: int) -> list[Chunk]:
    state = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).data
    return [
        Chunk(
            header=ChunkHeader(
                index=index,
                offset=offset,
                nbytes=len(payload),
                dtype=Dtype.U8,
                encoding=Encoding.DENSE,
                payload_nbytes=len(payload),
            ),
            payload=payload,
        )
        for index, offset in enumerate(range(0, nbytes, CHUNK_NBYTES))
        if (payload := state[offset : offset + CHUNK_NBYTES])
    ]


async def _serve(nbytes: int, seed: int) -> None:
    source = _Source(_chunks(nbytes, seed))
    add = add_TransferServiceServicer_to_server
    async with await start_server([Servicer(add=add, methods=source)]) as server:
        await source.hosts.start(
            listen="127.0.0.1:0",
            advertised=server.address,
            lanes=_hosted(),
        )
        _tell(server.address)
        await server.wait_stopped()


def _hosted() -> list[LaneKind]:
    return [LaneKind.SHM, LaneKind.TCP, LaneKind.UCX]


async def _pull(arguments: argparse.Namespace) -> None:
    clients = {name: Lanes(lanes=[LaneKind(name)]) for name in arguments.lanes}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    for number in range(arguments.rounds + 1):
        for name, lanes in clients.items():
            rows[name].append(await _measured(name, lanes, arguments, is_first=number == 0))
    for lanes in clients.values():
        await lanes.close()
    _tell({name: _summary(each) for name, each in rows.items()})


async def _measured(
    name: str, lanes: Lanes, arguments: argparse.Namespace, *, is_first: bool
) -> dict[str, float]:
    payloads: dict[int, Any] = {}
    cpu_s, started = _cpu_s(), time.perf_counter()
    async with aclosing(lanes.pull(arguments.endpoint, SPEC, SECRET)) as items:
        async for item in items:
            if isinstance(item, SentChunk):
                payloads[item.chunk.header.index] = item.chunk.payload
    wall_s, cpu_s = time.perf_counter() - started, _cpu_s() - cpu_s
    if is_first:
        _require_lane(name, arguments.nbytes)
        _require_same(payloads, arguments)
    nbytes = sum(map(len, payloads.values()))
    return {"gb_per_s": nbytes / wall_s / GB, "puller_cpu_s_per_gb": cpu_s * GB / nbytes}


def _require_lane(name: str, nbytes: int) -> None:
    """Stop where gRPC took the place of a lane that is not there."""
    if RECEIVED_NBYTES[name] != nbytes:
        raise SystemExit(f"the {name} lane does not work here: see `astraflow doctor`")


def _require_same(payloads: dict[int, Any], arguments: argparse.Namespace) -> None:
    sent = _chunks(arguments.nbytes, arguments.seed)
    for chunk in sent:
        if blake3(payloads[chunk.header.index]).digest() != blake3(chunk.payload).digest():
            raise SystemExit(f"chunk {chunk.header.index} arrived with other bytes")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    first, *rest = rows
    rates = [row["gb_per_s"] for row in rest]
    return {
        "first_gb_per_s": round(first["gb_per_s"], 2),
        "median_gb_per_s": round(median(rates), 2),
        "best_gb_per_s": round(max(rates), 2),
        "puller_cpu_s_per_gb": round(median(row["puller_cpu_s_per_gb"] for row in rest), 3),
    }


if __name__ == "__main__":
    main()
