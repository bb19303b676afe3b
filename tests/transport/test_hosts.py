"""Lanes by their names in a recipe."""

import subprocess
import sys
from pathlib import Path

import pytest

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


# A network of its own, which has nothing of IPv4 beside its loopback.
IPV6_ALONE = """
    ip link set lo up && ip addr add fd00::5/128 dev lo nodad && ip -6 route add default dev lo
    exec "$@"
"""

SERVE = """
import asyncio, socket
from astraflow.rpc.address import split_address
from astraflow.transport.grpc_lane import GrpcLane
from astraflow.weights.serve.server import RelayServer

async def main():
    server, lane = RelayServer(["solver"]), GrpcLane()
    await server.start(listen="0.0.0.0:0", advertise="auto")
    server.set_transfer_token(b"t")
    print(split_address(server.endpoint)[0])
    for each in await lane.list_lanes(server.endpoint, b"t"):
        with socket.create_connection(split_address(each.address)):
            print(each.lane)
    await lane.close()
    await server.close()

asyncio.run(main())
"""


@pytest.mark.root
def test_on_all_interfaces_a_host_with_ipv6_alone_is_reached_over_every_lane():
    command = ["unshare", "--net", "sh", "-c", IPV6_ALONE, "sh", sys.executable, "-c", SERVE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["fd00::5", "tcp"], done.stderr
