"""The hub's process, without its command line: serves a run, and writes its end."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from structlog.contextvars import bind_contextvars

from astraflow.config.loader import dump_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import Clock, SteadyClock, SystemClock
from astraflow.core.status import RunStatus
from astraflow.dataflow.account import Account
from astraflow.dataflow.compaction import compact_for_ever
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.loop_probe import LoopProbe
from astraflow.dataflow.metrics import HubMetrics
from astraflow.dataflow.opening import Opened, open_hub
from astraflow.dataflow.recorder import write_whole
from astraflow.dataflow.servicers import servicers_of
from astraflow.rpc.access import Access
from astraflow.rpc.server import RunningServer, start_server
from astraflow.rpc.streams import either
from astraflow.rpc.tls import Tls
from astraflow.rpc.tokens import HubTokens
from astraflow.telemetry.prometheus import LoopRead, MetricsServer

log = structlog.get_logger(__name__)

# Streams that are still open when the run is over get so long to say goodbye.
_STOP_GRACE_S = 1.0

OnReady = Callable[[Hub, str], None]


async def serve_hub(
    recipe: Recipe,
    *,
    run_dir: Path,
    tokens: HubTokens,
    listen: str | None = None,
    on_ready: OnReady | None = None,
    clock: Clock | None = None,
) -> RunStatus:
    """Serve a run until it is over; what it leaves lies in `run_dir`.

    Args:
        recipe: Resolved.
        run_dir: Folder of the run.
        tokens: With which it is entered.
        listen: host:port; None: the recipe's.
        on_ready: Called with the hub and its address once calls are answered.
        clock: None: the machine's, as it goes on from now: setting it moves no deadline.

    Returns:
        The run at its end, DONE or FAILED.

    Raises:
        AstraflowError: INVALID_FIELD for an address that is taken or a data set that cannot be
            read; JOURNAL_FAILED when the journal cannot be used, at the start or later: then
            nothing more was acknowledged; what the loading of data sets raises.
    """
    folder = RunDir(run_dir)
    clock = clock or SteadyClock(SystemClock())
    async with open_hub(recipe, folder, tokens=tokens, clock=clock) as opened:
        # On every record of the hub from here on: calls inherit it from the server's start.
        bind_contextvars(run=opened.hub.status().run_id)
        async with await _listen(opened.hub, recipe, tokens, listen) as server:
            with LoopProbe() as probe:
                async with _metrics(opened.hub, recipe, probe):
                    log.info("hub serves", address=server.address)
                    if on_ready is not None:
                        on_ready(opened.hub, server.address)
                    await _see_through(opened, server, probe, recipe=recipe, run_dir=folder)
            return opened.hub.status()


async def _listen(hub: Hub, recipe: Recipe, tokens: HubTokens, listen: str | None) -> RunningServer:
    """Answer calls from now on."""
    access = Access(tokens, sessions=hub.memory.sessions, roles=hub.memory.roles)
    tls = recipe.hub.tls
    return await start_server(
        servicers_of(hub, access),
        listen=listen or recipe.hub.listen,
        advertise=recipe.hub.advertise,
        tls=Tls(certificate=tls.certificate, key=tls.key, ca=tls.ca),
    )


@asynccontextmanager
async def _metrics(hub: Hub, recipe: Recipe, probe: LoopProbe) -> AsyncGenerator[None]:
    """Tell Prometheus what the hub does."""
    told = HubMetrics(hub, probe)
    metrics = MetricsServer(recipe.metrics.listen, LoopRead(told.look, told.tell))
    hub.metrics_address = metrics.address
    try:
        yield
    finally:
        # It may wait for the loop that closes it.
        await asyncio.to_thread(metrics.close)


async def _see_through(
    opened: Opened, server: RunningServer, probe: LoopProbe, *, recipe: Recipe, run_dir: RunDir
) -> None:
    """Work until the run is over, let calls end, and write the account."""
    account = Account(opened.hub, probe)
    try:
        await either(
            opened.hub.commits.run(),
            _keep(opened, recipe=recipe, run_dir=run_dir),
            _work(opened.hub, server),
        )
    finally:
        await asyncio.to_thread(opened.recorder.status, account.to_json())


async def _keep(opened: Opened, *, recipe: Recipe, run_dir: RunDir) -> None:
    """Keep the journal small, for ever."""
    if opened.journal is None:
        await asyncio.Event().wait()
        return
    if not run_dir.recipe.exists():
        write_whole(run_dir.recipe, dump_recipe(recipe))
    await compact_for_ever(
        opened.hub.commits,
        opened.journal,
        run_dir=run_dir.root,
        every_nbytes=recipe.hub.journal.compact_nbytes,
    )


async def _work(hub: Hub, server: RunningServer) -> None:
    """Work until the run is over, then let calls end."""
    await either(hub.draw(), hub.tick(), hub.wait_over())
    await server.stop(_STOP_GRACE_S)
