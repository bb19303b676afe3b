"""Opening: a hub is put together from a recipe and the folder of its run."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from astraflow import __version__
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.clock import Clock
from astraflow.core.events import HubRestarted
from astraflow.dataflow.data import open_data_sets
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.prompts import PromptSources
from astraflow.dataflow.recorder import Recorder
from astraflow.dataflow.recovery import open_run
from astraflow.dataflow.replica import Replica
from astraflow.rpc.tokens import HubTokens
from astraflow.storage.journal import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A hub that nobody can call yet.

    Attributes:
        hub: With the run as its journal has it.
        recorder: Of the run's folder.
        journal: Of the run; None: the recipe wants none.
    """

    hub: Hub
    recorder: Recorder
    journal: Journal | None


@asynccontextmanager
async def open_hub(
    recipe: Recipe, run_dir: RunDir, *, tokens: HubTokens, clock: Clock
) -> AsyncGenerator[Opened]:
    """Open data sets, journal and recorder; what was opened is closed at the end.

    Raises:
        AstraflowError: INVALID_FIELD for a data set that cannot be read; JOURNAL_FAILED; what the
            loading of data sets raises.
    """
    data_sets = await asyncio.to_thread(open_data_sets, recipe)
    sources = data_sets.sources(recipe.rollouts.data_sets, epochs=recipe.rollouts.epochs)
    recovered = await open_run(recipe, run_dir, size_of=data_sets.size, clock=clock)
    replica, journal = recovered.replica, recovered.journal
    async with AsyncExitStack() as exits:
        if journal is not None:
            exits.push_async_callback(journal.close)
        recorder = Recorder(run_dir, keep_one_group_of=_stride(recipe))
        exits.push_async_callback(asyncio.to_thread, recorder.close)
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
        if recovered.is_restarted:
            await _go_on(hub, replica, sources, recorder)
        yield Opened(hub=hub, recorder=recorder, journal=journal)


async def _go_on(hub: Hub, replica: Replica, sources: PromptSources, recorder: Recorder) -> None:
    """Bring what lies beside the journal to where it ends, and tell the run."""
    await asyncio.to_thread(sources.skip, replica.run.drawn_counts)
    recorder.make_up(replica.lines)
    hub.apply(HubRestarted(software=__version__))
    # Before the first call, not with the first commit.
    hub.memory.expect_all()


def _stride(recipe: Recipe) -> int:
    """Return of how many groups one is recorded: about one per batch."""
    return min(policy.trainer.groups_per_batch for policy in recipe.policies.values())
