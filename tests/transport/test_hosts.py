"""Lanes by their names in a recipe."""

from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.rpc.tls import Tls
from astraflow.transport.hosts import chosen_lanes

SECURE = Tls(ca=Path("ca.pem"))


def test_lanes_come_in_the_order_of_the_recipe():
    assert chosen_lanes("auto", None) is None
    assert chosen_lanes(("tcp", "grpc"), None) == (LaneKind.TCP, LaneKind.GRPC)
    assert chosen_lanes(("shm",), SECURE) == (LaneKind.SHM,)


def test_nothing_travels_in_the_clear_beside_tls():
    with pytest.raises(AstraflowError, match="tcp") as caught:
        chosen_lanes(("shm", "tcp"), SECURE)
    assert caught.value.reason is Reason.INVALID_FIELD
