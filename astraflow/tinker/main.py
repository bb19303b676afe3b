"""The process: a model is loaded, and served until the process is told to end."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from astraflow.config.pool import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.http import HttpLimits, HttpServer
from astraflow.rpc.tls import Tls
from astraflow.telemetry.logging import configure_logging
from astraflow.tinker.app import TinkerApp
from astraflow.tinker.checkpoints import TinkerCheckpoints
from astraflow.tinker.learner import LoadedBase, Settings
from astraflow.tinker.promises import Promises
from astraflow.tinker.samplers import Samplers
from astraflow.tinker.service import Service
from astraflow.trainers.causal_model import prepare_torch

_CONNECTIONS, _HOST_CONNECTIONS = 8192, 4096

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSettings:
    """What is served, and how.

    Attributes:
        model_dir: The Hugging Face directory that all models start from.
        base_model: What clients call it.
        listen: host:port; port 0 takes a free one.
        directory: Of checkpoints.
        engine: That samples.
        max_rank: Of an adapter.
        max_tokens_per_pass: Of one forward and backward pass.
        token: That clients show; empty: they show none.
        tls: Shown to clients; None: plain text.
    """

    model_dir: Path
    base_model: str
    listen: str
    directory: Path
    engine: EngineSettings
    max_rank: int
    max_tokens_per_pass: int
    token: str = ""
    tls: Tls | None = None

    def __post_init__(self) -> None:
        """Refuse a key that no client could show."""
        if self.token and not self.token.startswith(("tml-", "eyJ")):
            raise AstraflowError(
                Reason.INVALID_FIELD, "the key: clients send only keys that begin with tml-"
            )


def main_tinker(settings: TinkerSettings, *, as_json: bool) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code.

    Args:
        settings: Of the server.
        as_json: Whether the address is printed as JSON once it serves.
    """
    configure_logging("tinker")
    try:
        asyncio.run(_serve(settings, as_json=as_json))
    except AstraflowError as error:
        log.error("the server failed", reason=error.reason, why=error.message)  # noqa: TRY400
        return 1
    return 0


async def _serve(settings: TinkerSettings, *, as_json: bool) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serving(settings) as address:
        if as_json:
            print(json.dumps({"address": address}), flush=True)  # noqa: T201 - asked for
        log.info("serves", base_model=settings.base_model, base_url=f"http://{address}")
        await stopped.wait()


@asynccontextmanager
async def serving(settings: TinkerSettings) -> AsyncGenerator[str]:
    """Serve for a block; yield host:port.

    Args:
        settings: Of the server.

    Raises:
        AstraflowError: INVALID_FIELD for a model, settings or an address that cannot be served.
    """
    engine = settings.engine
    prepare_torch(thread_count=engine.thread_count)
    computed = Settings(
        model_dir=settings.model_dir,
        device=engine.device,
        max_context=engine.max_context,
        max_tokens_per_pass=settings.max_tokens_per_pass,
    )
    base = await asyncio.to_thread(LoadedBase, computed)
    samplers = Samplers(
        settings.model_dir, engine, layer_shapes=base.layer_shapes, max_rank=settings.max_rank
    )
    checkpoints = TinkerCheckpoints(
        settings.directory, base_model=settings.base_model, now=time.time
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            service = Service(
                base,
                samplers,
                checkpoints,
                Promises(tasks),
                base_model=settings.base_model,
                max_rank=settings.max_rank,
            )
            server = await HttpServer.start(
                TinkerApp(service).asgi(settings.token),
                listen=settings.listen,
                limits=HttpLimits(
                    connection_count=_CONNECTIONS, host_connection_count=_HOST_CONNECTIONS
                ),
                tls=settings.tls,
            )
            try:
                yield server.address
            finally:
                service.close()
                await server.close()
    finally:
        await samplers.close()
