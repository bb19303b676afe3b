"""The end of a measured link that serves: random weights, over every lane, as an origin does."""

import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from astraflow.core.dtype import Dtype
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.core.versions import LaneKind
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer

POLICY = PolicyId("bench")
VERSION = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSource:
    """Where the other end finds it.

    Attributes:
        endpoint: host:port.
        token: Who knows it is let in.
    """

    endpoint: str
    token: str


@contextmanager
def serve_link(
    nbytes: int, *, listen: str, advertise: str | None, lanes: Sequence[LaneKind] | None
) -> Generator[LinkSource]:
    """Serve one version of random bytes, which no codec makes smaller.

    Args:
        nbytes: Of the version; twice as many are in memory.
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
        yield LinkSource(endpoint=server.endpoint, token=token)
