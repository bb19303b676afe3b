"""The place of a pool at the Dataflow: registered, and again where it was forgotten."""

import asyncio
from typing import Any, Final, cast
from urllib.parse import urlsplit

import structlog

from astraflow.core.errors import AstraflowError
from astraflow.gateway.edge.peers import Peer
from astraflow.gateway.pool.pool import DataflowPool

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# A Dataflow answers once it has seen our /status, for which it waits two minutes.
_REGISTER_S: Final = 150.0
_ASK_S: Final = 10.0
_LOOK_S: Final = 15.0
# Some hundred bytes of each RaaS.
_POOL_NBYTES: Final = 8 << 20
# A Dataflow that is not told of a pool's end goes on to send it prompts.
_CONNECT_RETRIES: Final = 3


class Announcer:
    """Keeps a pool registered for as long as it has nodes."""

    def __init__(self, pool: DataflowPool, *, dataflow: str, url: str) -> None:
        """Prepare.

        Args:
            pool: Is registered.
            dataflow: http://host:port of the Dataflow.
            url: Of the pool's endpoints, as the Dataflow calls them.
        """
        self._pool = pool
        self._dataflow = dataflow.rstrip("/")
        self._url = url

    async def run(self) -> None:
        """Register, look, register again, until cancelled; then deregister."""
        # The operator named it: it may be dialled.
        dial = self._pool.settings.dial.also(urlsplit(self._dataflow).hostname)
        async with Peer(self._dataflow, dial, retries=_CONNECT_RETRIES) as peer:
            try:
                while True:
                    await self._pool.desk.until(lambda: self._pool.is_ready, _LOOK_S)
                    if self._pool.is_ready:
                        await self._keep(peer)
                    await asyncio.sleep(_LOOK_S / 15 if not self._pool.is_ready else _LOOK_S)
            finally:
                await self._leave(peer)

    async def _keep(self, peer: Peer) -> None:
        try:
            if not await self._is_known(peer):
                await self._register(peer)
        except AstraflowError as error:
            log.warning("the Dataflow does not answer", url=self._dataflow, why=error.message)

    async def _is_known(self, peer: Peer) -> bool:
        fields = await peer.ask_json("GET", "/raas_pool", timeout_s=_ASK_S, max_nbytes=_POOL_NBYTES)
        uid, instances = self._pool.settings.uid, fields.get("instances")
        known = cast("list[Any]", instances) if isinstance(instances, list) else []
        return any(
            isinstance(each, dict) and cast("dict[str, Any]", each).get("uid") == uid
            for each in known
        )

    async def _register(self, peer: Peer) -> None:
        fields = {
            "uid": self._pool.settings.uid,
            "raas_url": self._url,
            "gpu_count": self._pool.accelerator_count,
        }
        await peer.ask_json("POST", "/register_raas", fields, timeout_s=_REGISTER_S)
        log.info("registered", dataflow=self._dataflow, uid=self._pool.settings.uid)

    async def _leave(self, peer: Peer) -> None:
        try:
            uid = {"uid": self._pool.settings.uid}
            await peer.ask_json("POST", "/deregister_raas", uid, timeout_s=_ASK_S)
        except AstraflowError as error:
            log.info("the Dataflow was not told", why=error.message)
