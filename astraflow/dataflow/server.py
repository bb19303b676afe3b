"""The hub's process, without its command line: opens and serves a run, and writes its end."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import structlog
from structlog.contextvars import bind_contextvars

from astraflow import __version__
from astraflow.config.loader import dump_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import Clock, SteadyClock, SystemClock
from astraflow.core.events import HubRestarted
from astraflow.core.rollouts import PayloadStore
from astraflow.core.status import RunStatus
from astraflow.dataflow.compaction import Compaction
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.metrics import Account, HubView, LoopProbe
from astraflow.dataflow.payloads import PayloadCleaner
from astraflow.dataflow.prompts import open_data_sets
from astraflow.dataflow.recorder import RunRecorder, write_whole
from astraflow.dataflow.recovery import OnOpened, OnProgress, open_run, step_counts
from astraflow.dataflow.servicers import Recovery, servicers_of
from astraflow.rpc.access import Access, HubTokens
from astraflow.rpc.address import join_address, split_address
from astraflow.rpc.auth import Context
from astraflow.rpc.concurrency import either
from astraflow.rpc.server import RunningServer, Servicer, start_server
from astraflow.rpc.tls import Tls
from astraflow.storage.journal import Journal
from astraflow.telemetry.metrics import MetricsServer, loop_read
from astraflow.wire.journal import RunOpened


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedHub:
    """A hub that nobody can call yet.

    Attributes:
        hub: With the run as its journal has it.
    """

    hub: Hub
    opened: RunOpened
    recorder: RunRecorder


@asynccontextmanager
async def open_hub(
    recipe: Recipe,
    run_dir: RunDir,
    *,
    tokens: HubTokens,
    clock: Clock,
    reopens: bool = False,
    on_opened: OnOpened | None = None,
    on_progress: OnProgress | None = None,
) -> AsyncGenerator[OpenedHub]:
    """Open data sets, journal and recorder; what was opened is closed at the end.

    Raises:
        AstraflowError: INVALID_FIELD for a data set that cannot be read; JOURNAL_FAILED; RUN_ENDED
            when it is to be reopened and has nothing left to do; what the loading of data sets
            raises.
    """
    data_sets = await asyncio.to_thread(open_data_sets, recipe)
    epochs = recipe.rollouts.epochs
    sources = {name: data_sets.source(name, epochs=epochs) for name in recipe.rollouts.data_sets}
    recovered = await open_run(
        recipe,
        run_dir,
        size_of=data_sets.size,
        clock=clock,
        on_opened=on_opened,
        on_progress=on_progress,
    )
    replica, journal = recovered.replica, recovered.journal
    # A clock that was set back, or another host's, would have sessions end that much later.
    clock = SteadyClock(clock, not_before=replica.run.time)
    async with AsyncExitStack() as exits:
        if journal is not None:
            exits.push_async_callback(journal.close)
        payloads = await _open_payloads(recipe, replica.opened.run_id, clock)
        recorder = RunRecorder(
            run_dir,
            keep_one_group_of=_stride(recipe),
            payload_url="" if payloads is None else payloads.store.url,
        )
        exits.push_async_callback(asyncio.to_thread, recorder.close)
        hub = Hub(
            replica.run,
            data_sets=data_sets,
            sources=sources,
            recorder=recorder,
            clock=clock,
            journal=journal,
            directory=replica.directory,
            transfer_token=tokens.transfer(replica.opened.run_id),
            payloads=payloads,
        )
        if recovered.is_restarted:
            hub.replay_s = recovered.replay_s
            # Bring what lies beside the journal to where it ends, and tell the run.
            for name, drawn in replica.run.drawn_counts.items():
                await asyncio.to_thread(sources[name].seek, drawn)
            await asyncio.to_thread(recorder.make_up, replica.lines)
            counts = step_counts(recipe) if reopens else {}
            hub.apply(HubRestarted(software=__version__, step_counts=counts))
            # Before the first call, not with the first commit.
            hub.directory.expect_all()
            hub.end_revoked()
        yield OpenedHub(hub=hub, opened=replica.opened, recorder=recorder)


async def _open_payloads(recipe: Recipe, run_id: str, clock: Clock) -> PayloadCleaner | None:
    settings = recipe.rollouts.payloads
    if settings is None:
        return None
    url = f"{settings.url.rstrip('/')}/{run_id}"
    store = PayloadStore(url=url, above_nbytes=settings.above_nbytes)
    cleaner = PayloadCleaner(store, clock=clock)
    await cleaner.open()
    return cleaner


def _stride(recipe: Recipe) -> int:
    """Return of how many groups one is recorded: about one per batch."""
    return min(policy.trainer.groups_per_batch for policy in recipe.policies.values())


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
    reopens: bool = False,
) -> RunStatus:
    """Serve a run until it is over; what it leaves lies in `run_dir`.

    Args:
        recipe: Resolved.
        run_dir: Folder of the run.
        tokens: With which it is entered.
        listen: host:port; None: the recipe's.
        on_ready: Called with the hub and its address once calls are answered.
        clock: None: the machine's, as it goes on from now: setting it moves no deadline.
        reopens: Whether a run that was stopped, failed or reached its end goes on, for as many
            steps as the recipe says now.

    Returns:
        The run at its end, DONE or FAILED.

    Raises:
        AstraflowError: INVALID_FIELD for an address that is taken or a data set that cannot be
            read; JOURNAL_FAILED when the journal cannot be used, at the start or later: then
            nothing more was acknowledged; INTERNAL when the run failed to decide; RUN_ENDED when it
            is to be reopened and has nothing left to do; what the loading of data sets raises.
    """
    folder = RunDir(run_dir)
    clock = clock or SteadyClock(SystemClock())
    async with AsyncExitStack() as exits:
        async with _Recovering(recipe, listen or recipe.hub.listen) as recovering:
            if folder.journal.exists():
                await recovering.begin()
            opening = open_hub(
                recipe,
                folder,
                tokens=tokens,
                clock=clock,
                reopens=reopens,
                on_opened=recovering.note_opened,
                on_progress=recovering.answers.note,
            )
            opened = await exits.enter_async_context(opening)
        # On every record of the hub from here on: calls inherit it from the server's start.
        bind_contextvars(run=opened.hub.status().run_id)
        async with await _listen(opened.hub, recipe, tokens, recovering.place) as server:
            with LoopProbe() as probe:
                read = loop_read(partial(HubView.of, opened.hub, probe), HubView.families)
                async with MetricsServer(recipe.metrics.listen, read) as metrics:
                    opened.hub.metrics_address = metrics.address
                    log.info("hub serves", address=server.address)
                    if on_ready is not None:
                        on_ready(opened.hub, server.address)
                    await _see_through(opened, server, probe, recipe=recipe, run_dir=folder)
            return opened.hub.status()


class _Recovering:
    """Asks callers to come again while a journal is replayed.

    The port is free again at the end, for the hub itself.

    Attributes:
        place: Where the hub is to listen: on the same port.
        answers: What callers are told.
    """

    def __init__(self, recipe: Recipe, listen: str) -> None:
        self.place = listen
        self.answers = Recovery()
        self._recipe = recipe
        self._exits = AsyncExitStack()
        self._is_begun = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def begin(self) -> None:
        """Answer from now on."""
        self._is_begun = True
        serving = await _serve(self.answers.servicers, self._recipe, self.place)
        server = await self._exits.enter_async_context(serving)
        await server.set_serving(False)
        log.info("hub recovers", address=server.address)
        self.place = join_address(split_address(self.place, "listen")[0], server.port)

    async def note_opened(self, journal: Journal) -> None:
        """Answer from now on when there is something to replay.

        A hub that waits for a journal which another one may have must not answer: members of that
        one would wait here.
        """
        if journal.end and not self._is_begun:
            await self.begin()


async def _listen(hub: Hub, recipe: Recipe, tokens: HubTokens, listen: str) -> RunningServer:
    """Answer calls from now on."""
    access = Access(
        tokens,
        sessions=hub.directory.sessions,
        roles=hub.directory.roles,
        identities=recipe.hub.identities,
    )
    return await _serve(servicers_of(hub, access), recipe, listen, knows=access.knows)


async def _serve(
    servicers: Sequence[Servicer],
    recipe: Recipe,
    listen: str,
    *,
    knows: Callable[[Context], bool] = lambda _: True,
) -> RunningServer:
    return await start_server(
        servicers,
        listen=listen,
        advertise=recipe.hub.advertise,
        tls=Tls.of(recipe.hub.tls.model_dump()),
        knows=knows,
    )


async def _see_through(
    opened: OpenedHub, server: RunningServer, probe: LoopProbe, *, recipe: Recipe, run_dir: RunDir
) -> None:
    """Work until the run is over, let calls end, and write the account."""
    account = Account(opened.hub, probe)
    try:
        works: list[Coroutine[Any, Any, None]] = [
            _work(opened.hub, server),
            opened.hub.wait_broken(),
        ]
        journal = opened.hub.commits.journal
        if journal is not None:
            # To be fenced is an error, also while nothing is to be written.
            works += [opened.hub.commits.run(journal), journal.fenced()]
            works.append(_keep(opened, journal, recipe=recipe, run_dir=run_dir))
        await either(*works)
    finally:
        await asyncio.to_thread(opened.recorder.status, account.to_json())


async def _keep(opened: OpenedHub, journal: Journal, *, recipe: Recipe, run_dir: RunDir) -> None:
    """Keep the journal small, for ever."""
    if not run_dir.recipe.exists():
        write_whole(run_dir.recipe, dump_recipe(recipe))
    await Compaction(opened.hub, journal, opened=opened.opened, run_dir=run_dir).run()


async def _work(hub: Hub, server: RunningServer) -> None:
    """Work until the run is over, then let calls end."""
    works: list[Coroutine[Any, Any, None]] = [hub.read_prompts(), hub.tick(), hub.wait_over()]
    if hub.payloads is not None:
        works.append(hub.payloads.run(lambda: hub.run.payload_names))
    await either(*works)
    await server.stop(_STOP_GRACE_S)
    if hub.payloads is not None:
        await hub.payloads.clear()
