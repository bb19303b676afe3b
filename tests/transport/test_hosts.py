"""Lanes by their names in a recipe."""

from pathlib import Path

from astraflow.core.versions import LaneKind
from astraflow.rpc.tls import Tls
from astraflow.transport.hosts import chosen_lanes, is_encrypted

SECURE = Tls(ca=Path("ca.pem"))


def test_lanes_come_in_the_order_of_the_recipe():
    assert chosen_lanes("auto") is None
    assert chosen_lanes(("tcp", "grpc")) == (LaneKind.TCP, LaneKind.GRPC)


def test_lanes_are_encrypted_beside_tls_and_where_a_recipe_says_so():
    assert not is_encrypted(None, None)
    assert not is_encrypted(None, Tls())
    assert is_encrypted(None, SECURE)
    assert is_encrypted(True, None)
    assert not is_encrypted(False, SECURE)
