"""The near end: publishes a version whenever it is told to, and serves it.

    python -m fanout_ends.origin ADDRESS ELEMENTS SHARE

First it says where it serves; each line of stdin asks for a version, which it answers with.
"""

import base64
import json
import sys
from collections.abc import Iterator
from typing import Final

import numpy as np

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.telemetry.logging import configure_logging
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer
from astraflow.wire.versions import encode_version_info

POLICY: Final = PolicyId("fanout")
TOKEN: Final = b"fanout"
_TENSORS: Final = 8


def main() -> None:
    configure_logging("origin")  # to stderr: stdout is for answers
    address, count, share = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    layout = Layout.of([(f"w{n}", Dtype.BF16, (count // _TENSORS,)) for n in range(_TENSORS)])
    publisher = WeightPublisher(POLICY, layout)
    with WeightServer(publisher, listen=f"{address}:0") as server:
        server.set_transfer_token(TOKEN)
        print(json.dumps({"endpoint": server.endpoint}), flush=True)
        for version, tensors in enumerate(_versions(layout, share)):
            if not sys.stdin.readline():
                return
            info = publisher.publish(version, tensors)
            message = encode_version_info(info).SerializeToString()
            sizes = [each.payload_nbytes for each in info.patches]
            answer = {"info": base64.b64encode(message).decode(), "patch_nbytes": min(sizes)}
            print(json.dumps(answer), flush=True)


def _versions(layout: Layout, share: float) -> Iterator[dict[str, np.ndarray]]:
    """Yield weights of which a share moves by a unit of the last place."""
    rng = np.random.default_rng(0)
    tensors = {
        spec.name: (
            rng.normal(0, 0.02, spec.shape).astype(np.float32).view(np.uint32) >> 16
        ).astype(np.uint16)
        for spec in layout.tensors
    }
    while True:
        yield tensors
        tensors = {
            name: bits + (rng.random(bits.shape, np.float32) < share)
            for name, bits in tensors.items()
        }


if __name__ == "__main__":
    main()
