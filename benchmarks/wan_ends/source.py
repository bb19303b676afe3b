"""The near end: serves so many random bytes in all ways until its stdin ends.

python -m wan_ends.source ADDRESS NBYTES
"""

import json
import sys

import numpy as np

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.telemetry.logging import configure_logging
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer
from wan_ends.baselines import BUFFER_NBYTES, made_up_tls, serve_grpc, serve_sockets

POLICY = PolicyId("wan")
TOKEN = b"wan"


def main() -> None:
    configure_logging("source")  # to stderr: stdout is for answers
    address, nbytes = sys.argv[1], int(sys.argv[2])
    # Random bytes: no codec makes them fewer.
    data = np.random.default_rng(0).bytes(nbytes)
    layout = Layout.of([("w", Dtype.F8_E4M3, (nbytes,))])
    publisher = WeightPublisher(POLICY, layout)
    info = publisher.publish(0, {"w": np.frombuffer(data, np.uint8)})
    grpc_server, grpc_port = serve_grpc(address, data)
    with (
        WeightServer(publisher, listen=f"{address}:0") as server,
        WeightServer(publisher, listen=f"{address}:0", encrypts=True) as encrypted,
    ):
        server.set_transfer_token(TOKEN)
        encrypted.set_transfer_token(TOKEN)
        places = {
            "nbytes": nbytes,
            "weights": server.endpoint,
            "encrypted": encrypted.endpoint,
            "layout_digest": info.layout_digest.hex(),
            "grpc": grpc_port,
            "warm": serve_sockets(address, data, buffer_nbytes=None),
            "warm tls": serve_sockets(address, data, buffer_nbytes=None, tls=made_up_tls()),
            "published": serve_sockets(address, data, buffer_nbytes=BUFFER_NBYTES),
        }
        print(json.dumps(places), flush=True)
        sys.stdin.read()
    grpc_server.stop(None)


if __name__ == "__main__":
    main()
