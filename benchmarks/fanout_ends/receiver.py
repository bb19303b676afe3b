"""The far end: one receiver, which relays what it pulls.

    python -m fanout_ends.receiver

First it says where it relays; each line of stdin names a version with its sources, each answer
says when it was held, by the clock of the machine, what CPU it took, and what each source gave.
"""

import asyncio
import base64
import json
import sys
import time
from typing import Any

from astraflow.core.versions import VersionInfo
from astraflow.telemetry.logging import configure_logging
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.serve.server import RelayServer
from astraflow.wire.versions import decode_version_info
from astraflow_proto.weights.v1 import version_pb2
from fanout_ends.origin import POLICY, TOKEN


async def main() -> None:
    configure_logging("receiver")
    relays = RelayServer([POLICY])
    await relays.start()
    relays.set_transfer_token(TOKEN)
    puller = WeightPuller(POLICY, relay=relays.relays[POLICY])
    print(json.dumps({"endpoint": relays.endpoint}), flush=True)
    known: dict[int, VersionInfo] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        info = decode_version_info(
            version_pb2.VersionInfo.FromString(base64.b64decode(json.loads(line)["info"]))
        )
        known[info.version] = info
        print(json.dumps(await _pull(puller, info, known)), flush=True)
    await puller.close()
    await relays.close()


async def _pull(
    puller: WeightPuller, info: VersionInfo, known: dict[int, VersionInfo]
) -> dict[str, Any]:
    began = time.process_time()
    pulled = await puller.pull(info, known, TOKEN)
    done = time.monotonic()
    # What is held is written after the version counts as there.
    await puller.flush()
    return {
        "done": done,
        "cpu_s": time.process_time() - began,
        "nbytes": pulled.nbytes,
        "sources": {each.address: each.nbytes for each in pulled.reports},
        "failed": [each.failure.message for each in pulled.reports if each.failure],
    }


if __name__ == "__main__":
    asyncio.run(main())
