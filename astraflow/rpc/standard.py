"""The standard services of every server: health checking and reflection.

Their packages come without types for asyncio; this file is where that ends.
"""

from collections.abc import Sequence
from typing import Any, cast

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

_health = cast("Any", health)


class Health:
    """`grpc.health.v1.Health` of one server."""

    def __init__(self, server: grpc.aio.Server, services: Sequence[str]) -> None:
        self._services = ("", *services)
        self._servicer = _health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, is_serving: bool) -> None:
        """Answer SERVING, or NOT_SERVING, for the server and each of its services."""
        status = health_pb2.HealthCheckResponse
        for service in self._services:
            await self._servicer.set(service, status.SERVING if is_serving else status.NOT_SERVING)


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serve reflection for services, beside health and reflection themselves."""
    names = (*services, _health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
