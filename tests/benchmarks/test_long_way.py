"""What a long way must not break."""

import subprocess
import sys

import pytest

from link import Link, LinkUnavailableError, Profile

pytestmark = pytest.mark.root

SERVE = """
import asyncio, sys
from astraflow.rpc.server import start_server

async def main():
    server = await start_server([], listen=sys.argv[1] + ":0")
    print(server.address, flush=True)
    await server.wait_stopped()

asyncio.run(main())
"""
CALL = """
import asyncio, sys
from grpc_health.v1 import health_pb2, health_pb2_grpc
from astraflow.rpc.channel import dial

async def main():
    channel = dial(sys.argv[1])
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    print(answer.status)
    await channel.close()

asyncio.run(main())
"""


@pytest.mark.slow
def test_first_call_connects_over_half_a_second():
    try:
        with Link(Profile(name="moon", mbit_per_s=100, rtt_ms=500)) as link:
            words = [sys.executable, "-c", SERVE, link.near.address]
            with link.near.popen(words, stdout=subprocess.PIPE, text=True) as server:
                address = server.stdout.readline().strip()
                assert link.far.run([sys.executable, "-c", CALL, address]).strip() == "1"
                server.kill()
    except LinkUnavailableError as error:
        pytest.skip(str(error))
