"""The place of a pool at the Dataflow: registered, and again where it was forgotten."""

import asyncio
from typing import Any, Final, cast

import httpx
import structlog

from astraflow.gateway.pool.pool import DataflowPool

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# A Dataflow answers once it has seen our /status, for which it waits two minutes.
_REGISTER_S: Final = 150.0
_ASK_S: Final = 10.0
_LOOK_S: Final = 15.0
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
        again = httpx.AsyncHTTPTransport(retries=_CONNECT_RETRIES)
        async with httpx.AsyncClient(
            base_url=self._dataflow, timeout=_ASK_S, transport=again
        ) as http:
            try:
                while True:
                    await self._pool.desk.until(lambda: self._pool.is_ready, _LOOK_S)
                    if self._pool.is_ready:
                        await self._keep(http)
                    await asyncio.sleep(_LOOK_S / 15 if not self._pool.is_ready else _LOOK_S)
            finally:
                await self._leave(http)

    async def _keep(self, http: httpx.AsyncClient) -> None:
        try:
            if not await self._is_known(http):
                await self._register(http)
        except (httpx.HTTPError, ValueError) as error:
            log.warning("the Dataflow does not answer", url=self._dataflow, why=repr(error))

    async def _is_known(self, http: httpx.AsyncClient) -> bool:
        fields = cast("dict[str, Any]", (await http.get("/raas_pool")).json())
        uids = {each.get("uid") for each in fields.get("instances", [])}
        return self._pool.settings.uid in uids

    async def _register(self, http: httpx.AsyncClient) -> None:
        fields = {
            "uid": self._pool.settings.uid,
            "raas_url": self._url,
            "gpu_count": self._pool.accelerator_count,
        }
        answer = await http.post("/register_raas", json=fields, timeout=_REGISTER_S)
        answer.raise_for_status()
        log.info("registered", dataflow=self._dataflow, uid=self._pool.settings.uid)

    async def _leave(self, http: httpx.AsyncClient) -> None:
        try:
            await http.post("/deregister_raas", json={"uid": self._pool.settings.uid})
        except httpx.HTTPError as error:
            log.info("the Dataflow was not told", why=repr(error))
