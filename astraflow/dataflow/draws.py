"""Draws: prompts that the run asks for, read from a disk by a thread."""

import asyncio

import structlog

from astraflow.core.effects import DrawAgain, DrawPrompts
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.events import EvalPromptsOffered, Event, PromptsOffered, RunBroken
from astraflow.dataflow.hands import Draw
from astraflow.dataflow.prompts import DataSets, PromptSources

log = structlog.get_logger(__name__)


async def read_draw(draw: Draw, sources: PromptSources, data_sets: DataSets) -> Event:
    """Read what a draw asks for; what cannot be read breaks the run."""
    try:
        if isinstance(draw, DrawPrompts):
            name, count = draw.data_set, draw.count
            prompts = await asyncio.to_thread(sources.draw, name, count)
            return PromptsOffered(prompts=prompts, data_set=name, is_last=len(prompts) < count)
        if isinstance(draw, DrawAgain):
            again = await asyncio.to_thread(data_sets.find, draw.prompts)
            return PromptsOffered(prompts=again, is_again=True)
        rows = await asyncio.to_thread(data_sets.first_passes, draw.data_sets)
        return EvalPromptsOffered(eval_run_id=draw.eval_run_id, prompts=rows)
    except AstraflowError as error:
        return RunBroken(failure=error.to_failure())
    except (OSError, ValueError, KeyError) as error:
        message = f"the prompts cannot be read ({error}); look at the recipe's data sets"
        log.exception("prompts cannot be read")
        return RunBroken(failure=Failure(reason=Reason.INTERNAL, message=message))
