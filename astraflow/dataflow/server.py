"""The hub's process, without its command line: opens data, serves a run, writes the end."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
from structlog.contextvars import bind_contextvars

from astraflow.config.loader import dump_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import Clock, SystemClock
from astraflow.core.events import HubRestarted
from astraflow.core.status import RunStatus
from astraflow.dataflow.access import Access
from astraflow.dataflow.account import Account
from astraflow.dataflow.compaction import compact_for_ever
from astraflow.dataflow.data import open_data_sets
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.loop_probe import LoopProbe
from astraflow.dataflow.metrics import HubMetrics
from astraflow.dataflow.recorder import Recorder
from astraflow.dataflow.recovery import open_run
from astraflow.dataflow.servicers import servicers_of
from astraflow.dataflow.streams import either
from astraflow.dataflow.tokens import HubTokens
from astraflow.rpc.server import RunningServer, start_server
from astraflow.rpc.tls import Tls
from astraflow.storage.journal import Journal
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
        clock: None: the machine's.

    Returns:
        The run at its end, DONE or FAILED.

    Raises:
        AstraflowError: INVALID_FIELD for an address that is taken or a data set that cannot be
            read; JOURNAL_FAILED when the journal cannot be used, at the start or later: then
            nothing more was acknowledged; what the loading of data sets raises.
    """
    clock = clock or SystemClock()
    data_sets = await asyncio.to_thread(open_data_sets, recipe)
    sources = data_sets.sources(recipe.rollouts.data_sets, epochs=recipe.rollouts.epochs)
    folder = RunDir(run_dir)
    recovered = await open_run(recipe, folder, size_of=data_sets.size, clock=clock)
    replica, journal = recovered.replica, recovered.journal
    recorder = Recorder(folder, keep_one_group_of=_stride(recipe))
    hub = Hub(
        replica.run,
        data_sets=data_sets,
        sources=sources,
        recorder=recorder,
        clock=clock,
        journal=journal,
        memory=replica.memory,
        transfer_token=tokens.transfer(replica.opened.run_id),
    )
    try:
        if recovered.is_restarted:
            await asyncio.to_thread(sources.skip, replica.run.drawn_counts)
            recorder.make_up(replica.lines)
            hub.apply(HubRestarted())
            # Before the first call, not with the first commit.
            hub.memory.expect_all()
        return await _serve(
            hub,
            recipe=recipe,
            tokens=tokens,
            listen=listen,
            recorder=recorder,
            on_ready=on_ready,
            journal=journal,
            run_dir=folder,
        )
    finally:
        await asyncio.to_thread(recorder.close)
        if journal is not None:
            await journal.close()


async def _serve(
    hub: Hub,
    *,
    recipe: Recipe,
    tokens: HubTokens,
    listen: str | None,
    recorder: Recorder,
    on_ready: OnReady | None,
    journal: Journal | None,
    run_dir: RunDir,
) -> RunStatus:
    # On every record of the hub from here on: calls inherit it from the server's start.
    bind_contextvars(run=hub.run.status(hub.now()).run_id)
    access = Access(tokens, sessions=hub.memory.sessions, roles=hub.memory.roles)
    tls = recipe.hub.tls
    server = await start_server(
        servicers_of(hub, access),
        listen=listen or recipe.hub.listen,
        advertise=recipe.hub.advertise,
        tls=Tls(certificate=tls.certificate, key=tls.key, ca=tls.ca),
    )
    async with server:
        async with AsyncExitStack() as exits:
            probe = exits.enter_context(LoopProbe())
            account = Account(hub, probe)
            told = HubMetrics(hub, probe)
            metrics = MetricsServer(recipe.metrics.listen, LoopRead(told.look, told.tell))
            # It may wait for the loop that closes it.
            exits.push_async_callback(asyncio.to_thread, metrics.close)
            hub.metrics_address = metrics.address
            log.info("hub serves", address=server.address)
            if on_ready is not None:
                on_ready(hub, server.address)
            try:
                await either(
                    hub.commits.run(),
                    _keep(hub, journal, recipe=recipe, run_dir=run_dir),
                    _see_through(hub, server),
                )
            finally:
                await asyncio.to_thread(recorder.status, account.to_json())
        return hub.status()


async def _keep(hub: Hub, journal: Journal | None, *, recipe: Recipe, run_dir: RunDir) -> None:
    """Keep the journal small, for ever."""
    if journal is None:
        await asyncio.Event().wait()
        return
    if not run_dir.recipe.exists():
        run_dir.recipe.write_text(dump_recipe(recipe))
    await compact_for_ever(
        hub.commits,
        journal,
        run_dir=run_dir.root,
        every_nbytes=recipe.hub.journal.compact_nbytes,
    )


async def _see_through(hub: Hub, server: RunningServer) -> None:
    """Work until the run is over, then let calls end."""
    await either(hub.draw(), hub.tick(), hub.wait_over())
    await server.stop(_STOP_GRACE_S)


def _stride(recipe: Recipe) -> int:
    """Return of how many groups one is recorded: about one per batch."""
    return min(policy.trainer.groups_per_batch for policy in recipe.policies.values())
