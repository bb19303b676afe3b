"""A node that holds nothing pulls a model: what it takes of memory, while a source is killed.

    python benchmarks/cold_join.py --elements 268435456 --json cold_join.json [--relay]

Two processes serve the same version, made up from a seed. A third one pulls it, and says when half
of it is there: then the first source is killed. What the puller has resident at most, shared memory
included, less what it had before, is compared with the bytes of the model (bf16), for each profile,
over TCP and over whichever lane is chosen on one host.
"""

import argparse
import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import (
    CodecProfile,
    LaneKind,
    SourceInfo,
    SourceKind,
    SourceState,
    VersionInfo,
)
from astraflow.telemetry.logging import configure_logging
from astraflow.weights.fetch.lanes import AnyLane
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.patch import make_patch
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.relay import WeightRelay
from astraflow.weights.serve.server import WeightServer
from astraflow.wire.versions import decode_version_info, encode_version_info
from astraflow_proto.weights.v1 import version_pb2

POLICY: Final = PolicyId("cold")
TOKEN: Final = b"cold"
TENSOR_COUNT: Final = 16


def main() -> None:
    given = arguments()
    configure_logging("cold-join")
    if given.role == "source":
        serve(given)
    elif given.role == "puller":
        asyncio.run(pull(given))
    else:
        rows = [
            measured(given, profile, lane) for profile in CodecProfile for lane in ("tcp", "any")
        ]
        worst = max(row["of_model"] for row in rows)
        print(f"at worst {worst:.2f} times the model")
        if given.json:
            result = {"benchmark": "cold_join", "elements": given.elements, "rows": rows}
            given.json.write_text(json.dumps(result | {"worst": worst}, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--elements", type=int, default=256 << 20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--relay", action="store_true", help="the puller is a relay, too")
    parser.add_argument("--role", choices=["source", "puller"], help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=CodecProfile, help=argparse.SUPPRESS)
    parser.add_argument("--lane", choices=["tcp", "any"], help=argparse.SUPPRESS)
    return parser.parse_args()


def measured(given: argparse.Namespace, profile: CodecProfile, lane: str) -> dict[str, Any]:
    """Return what a pull in one profile over one lane takes."""
    roles = ["--elements", str(given.elements), "--profile", profile, "--lane", lane]
    roles += ["--relay"] if given.relay else []
    with ExitStack() as stack:
        sources = [stack.enter_context(started("source", *roles)) for _ in range(2)]
        told = [answer(each) for each in sources]
        puller = stack.enter_context(started("puller", *roles))
        tell(puller, {"info": told[0]["info"], "endpoints": [each["endpoint"] for each in told]})
        answer(puller)
        sources[0].send_signal(signal.SIGKILL)
        row = {"profile": profile, "lane": lane} | answer(puller)
    print(
        f"  {profile:8} {lane:4} model {row['model_nbytes'] / 1e6:8.1f} MB  peak"
        f" {row['peak_nbytes'] / 1e6:8.1f} MB  {row['of_model']:.2f} times"
        f"  in {row['seconds']:.1f} s, from {row['source_count']} sources",
        flush=True,
    )
    return row


@contextmanager
def started(role: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run this script in another role; it ends with its stdin, or is killed."""
    command = [sys.executable, __file__, "--role", role, *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def pipe(end: IO[str] | None) -> IO[str]:
    if end is None:
        raise AssertionError("the process was started with pipes")
    return end


def tell(process: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
    stdin = pipe(process.stdin)
    stdin.write(json.dumps(message) + "\n")
    stdin.flush()


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = pipe(process.stdout).readline()
    if not line:
        raise SystemExit("a process ended early; its log says why")
    return json.loads(line)


def serve(given: argparse.Namespace) -> None:
    """Publish one version in one profile, and serve it until stdin ends."""
    count = given.elements // TENSOR_COUNT
    layout = Layout.of([(f"w{n}", Dtype.BF16, (count,)) for n in range(TENSOR_COUNT)])
    publisher = WeightPublisher(POLICY, layout)
    with WeightServer(publisher) as server:
        server.set_transfer_token(TOKEN)
        info = publisher.publish(0, weights(layout))
        if given.profile is CodecProfile.COMPACT:
            whole = make_patch(publisher.history, None, 0, profile=CodecProfile.COMPACT)
            publisher.store.offer([whole])
            info = replace(info, patches=(whole.info,))
        message = base64.b64encode(encode_version_info(info).SerializeToString()).decode()
        print(json.dumps({"endpoint": server.endpoint, "info": message}), flush=True)
        sys.stdin.read()


def weights(layout: Layout) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    first = rng.standard_normal(layout.tensors[0].shape, np.float32) * np.float32(0.02)
    bits = (first.view(np.uint32) >> 16).astype(np.uint16)
    return {spec.name: np.roll(bits, number) for number, spec in enumerate(layout.tensors)}


class Half:
    """Prints a line once half of the version is there."""

    def __init__(self) -> None:
        self._incoming: IncomingVersion | None = None
        self._is_said = False

    def begin(self, incoming: IncomingVersion, frame: ShardLayout) -> None:
        """Take note of the pull."""
        del frame
        self._incoming = incoming

    def note(self) -> None:
        """Look how far it is."""
        incoming = self._incoming
        if incoming is None or not incoming.planned or self._is_said:
            return
        # Chunks are counted as equal.
        infos = [patch.info for patch in incoming.planned]
        share = len(incoming.missing()) / max(1, sum(info.chunk_count for info in infos))
        if share * sum(info.payload_nbytes for info in infos) <= incoming.nbytes:
            self._is_said = True
            print(json.dumps({"half": incoming.nbytes}), flush=True)


async def pull(given: argparse.Namespace) -> None:
    """Pull what stdin says, and print the peak."""
    asked = json.loads(sys.stdin.readline())
    message = version_pb2.VersionInfo.FromString(base64.b64decode(asked["info"]))
    info = at(decode_version_info(message), asked["endpoints"])
    lane = AnyLane(lanes=[LaneKind.TCP] if given.lane == "tcp" else None)
    relay = WeightRelay() if given.relay else None
    puller = WeightPuller(POLICY, lane=lane, progress=Half(), relay=relay)
    before = resident_nbytes("VmRSS")
    pulled = await puller.pull(info, {info.version: info}, TOKEN)
    # An engine copies one tensor after the other, and lets it go.
    for part in pulled.update.tensors:
        part.values.copy()
    peak, model = resident_nbytes("VmHWM") - before, pulled.update.nbytes
    row = {
        "model_nbytes": model,
        "peak_nbytes": peak,
        "of_model": peak / model,
        "seconds": pulled.duration.total_seconds(),
        "source_count": sum(report.nbytes > 0 for report in pulled.reports),
    }
    print(json.dumps(row), flush=True)
    await puller.close()


def at(info: VersionInfo, endpoints: Sequence[str]) -> VersionInfo:
    sources = (
        SourceInfo(kind=SourceKind.ORIGIN, state=SourceState.LIVE, endpoint=each)
        for each in endpoints
    )
    return replace(info, sources=tuple(sources))


def resident_nbytes(name: str) -> int:
    """Return what is resident of this process, now (VmRSS) or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
