"""Adapted servers: one server of a model, shared by the policies that adapt it."""

from typing import Protocol

from astraflow.config.recipe import EngineSettings
from astraflow.core.rollouts import KvPolicy
from astraflow.engines.served.asking import Asking
from astraflow.engines.served.dialect import AdapterRoom, Dialect
from astraflow.engines.served.host import ServerHost
from astraflow.engines.served.meter import Meter
from astraflow.engines.served.model import Model
from astraflow.engines.served.silence import end_silence


class Tenant(Protocol):
    """A policy whose adapters are in the server."""

    async def restore(self) -> None:
        """Give a server that was started again what the one before had."""
        ...

    async def leave(self) -> None:
        """Take what is there from the server."""
        ...


class AdaptedServer:
    """Samples with adapters beside its model.

    Attributes:
        dialect: How it is spoken with.
        model: That it serves.
        host: Keeps it running.
        tenants: Who shares it.
    """

    def __init__(
        self, dialect: Dialect, *, model: Model, settings: EngineSettings, room: AdapterRoom
    ) -> None:
        """Start the server, or attach to it; needs a running event loop."""
        self.dialect = dialect
        self.model = model
        self.tenants: list[Tenant] = []
        self._is_attached = settings.url is not None
        self._kv = KvPolicy(settings.kv)
        self.host = ServerHost(
            dialect, model=model, settings=settings, on_lost=self._lost, adapters=room
        )

    def asking(self, meter: Meter) -> Asking:
        """Return what asks it for completions of one policy.

        Args:
            meter: Counts them.
        """
        server = self.host.server
        self.host.background.start(meter.follow(server, self.dialect))
        self.host.background.start(end_silence(server, meter, is_changing=lambda: False))
        return Asking(
            self.dialect,
            model=self.model,
            server=server,
            meter=meter,
            background=self.host.background,
            kv=self._kv,
        )

    async def close(self) -> None:
        """End the server, or leave it as it was; the second time does nothing."""
        if self._is_attached and self.host.server.life.is_up:
            for tenant in self.tenants:
                await tenant.leave()
        await self.host.close()

    def _lost(self) -> None:
        for tenant in self.tenants:
            self.host.background.start(tenant.restore())
