"""Prompts: reads the data sets of a recipe as the run asks for them, pass after pass."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

from astraflow.config.recipe import Recipe
from astraflow.core.batches import IssuedPrompt
from astraflow.core.effects import DrawAgain, DrawPrompts
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.events import EvalPromptsOffered, Event, PromptsOffered, RunBroken
from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt
from astraflow.dataflow.effect_executor import PromptRequest
from astraflow.wire.fields import encode_json
from astraflow.workflows.data_sets import DataSetReader, open_data_set

# Of the prompts of one event, which is one record of the journal: SQLite takes 1 GB, and the hub
# does nothing else while it encodes them. A row of programs to be judged may have megabytes.
_EVENT_NBYTES = 8 << 20


class PromptSource:
    """The prompts to train on: passes over one data set, as many as the recipe says."""

    def __init__(self, reader: DataSetReader, *, name: str, epochs: int | None) -> None:
        """Start at the first row of the first pass.

        Raises:
            AstraflowError: INVALID_FIELD when there is no row to draw.
        """
        if not len(reader):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"data set {name} has no rows; look at its path, limit and max_prompt_chars",
                metadata={"field": f"data.{name}"},
            )
        self._reader = reader
        self._epochs = epochs
        self.seek(0)

    def seek(self, count: int) -> None:
        """Go on after the first so many prompts, which are not read."""
        first, start = divmod(count, len(self._reader))
        passes = itertools.count(first) if self._epochs is None else range(first, self._epochs)
        self._rows = (
            prompt
            for number in passes
            for prompt in self._reader.epoch(number, start=start if number == first else 0)
        )

    def draw(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        """Return up to so many of the next prompts, and whether the last pass is through."""
        return _take(self._rows, count)


class DataSets:
    """All data sets of a recipe, by name."""

    def __init__(self, readers: Mapping[str, DataSetReader]) -> None:
        self._readers = readers

    def source(self, name: str, *, epochs: int | None) -> PromptSource:
        return PromptSource(self._readers[name], name=name, epochs=epochs)

    def find(self, issued: Sequence[IssuedPrompt]) -> tuple[Prompt, ...]:
        """Return prompts that were drawn before, in the order asked for.

        Raises:
            AstraflowError: PROMPT_UNKNOWN when one is not in its data set any more.
        """
        wanted = dict[tuple[str, int], set[PromptId]]()
        for each in issued:
            wanted.setdefault((each.data_set, each.epoch), set()).add(each.prompt_id)
        found = {
            (name, epoch, prompt.prompt_id): prompt
            for (name, epoch), prompt_ids in wanted.items()
            for prompt in self._readers[name].epoch(epoch)
            if prompt.prompt_id in prompt_ids
        }
        try:
            return tuple(found[each.data_set, each.epoch, each.prompt_id] for each in issued)
        except KeyError as error:
            raise AstraflowError(
                Reason.PROMPT_UNKNOWN,
                f"prompt {error} was drawn before and is not in its data set any more; restore the "
                "data set as it was when the run began",
            ) from error

    def first_pass(self, name: str) -> Iterator[Prompt]:
        """Return every row of a data set, for an evaluation."""
        return iter(self._readers[name].epoch(0))

    def size(self, name: str) -> int:
        return len(self._readers[name])


log = structlog.get_logger(__name__)


def open_data_sets(recipe: Recipe) -> DataSets:
    """Open every data set; rows that are too long are left out and counted in the log.

    Raises:
        AstraflowError: INVALID_FIELD when one cannot be read.
    """
    readers: dict[str, DataSetReader] = {}
    for name, settings in recipe.data.items():
        reader = open_data_set(name, settings, Path.cwd(), seed=recipe.seed)
        readers[name] = reader
        log.info("data set", name=name, prompts=len(reader), left_out=reader.left_out_count)
    return DataSets(readers)


def _take(prompts: Iterator[Prompt], count: int) -> tuple[tuple[Prompt, ...], bool]:
    """Return the next prompts, of one event, and whether there are no more."""
    found: list[Prompt] = []
    nbytes = 0
    while len(found) < count and nbytes < _EVENT_NBYTES:
        prompt = next(prompts, None)
        if prompt is None:
            return tuple(found), True
        found.append(prompt)
        nbytes += len(encode_json(prompt.fields)) + sum(map(len, prompt.blobs.values()))
    return tuple(found), False


async def read_prompts(
    request: PromptRequest, sources: Mapping[str, PromptSource], data_sets: DataSets
) -> AsyncIterator[Event]:
    """Read what a request asks for; what cannot be read breaks the run."""
    try:
        if isinstance(request, DrawPrompts):
            name, count = request.data_set, request.count
            prompts, is_last = await asyncio.to_thread(sources[name].draw, count)
            yield PromptsOffered(prompts=prompts, data_set=name, is_last=is_last)
        elif isinstance(request, DrawAgain):
            again, is_last = iter(await asyncio.to_thread(data_sets.find, request.prompts)), False
            while not is_last:
                prompts, is_last = await asyncio.to_thread(_take, again, len(request.prompts) + 1)
                yield PromptsOffered(prompts=prompts, is_again=True)
        else:
            for name in request.data_sets:
                rows, count, is_last = data_sets.first_pass(name), data_sets.size(name), False
                while not is_last:
                    prompts, is_last = await asyncio.to_thread(_take, rows, count + 1)
                    yield EvalPromptsOffered(
                        eval_run_id=request.eval_run_id,
                        prompts={name: prompts},
                        goes_on=not (is_last and name == request.data_sets[-1]),
                    )
    except AstraflowError as error:
        yield RunBroken(failure=error.to_failure())
    except (OSError, ValueError, KeyError) as error:
        message = f"the prompts cannot be read ({error}); look at the recipe's data sets"
        log.exception("prompts cannot be read")
        yield RunBroken(failure=Failure(reason=Reason.INTERNAL, message=message))
