"""Prompts: draws them from the data sets of a recipe, pass after pass."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Protocol

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PromptId
from astraflow.core.lineage import IssuedPrompt
from astraflow.core.tasks import Prompt


class PromptReader(Protocol):
    """What is needed of a data set."""

    def __len__(self) -> int:
        """Return how many rows there are."""
        ...

    def epoch(self, number: int) -> Iterator[Prompt]:
        """Yield every row once, in the order of that pass."""
        ...


class PromptSource:
    """The prompts to train on: passes over one data set, as many as the recipe says."""

    def __init__(self, reader: PromptReader, *, name: str, epochs: int | None) -> None:
        """Start at the first row of the first pass.

        Args:
            reader: The data set.
            name: Of the data set.
            epochs: Passes; None: without end.

        Raises:
            AstraflowError: INVALID_FIELD when there is no row to draw.
        """
        if not len(reader):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"data set {name} has no rows; look at its path, limit and max_prompt_chars",
                metadata={"field": f"data.{name}"},
            )
        passes = range(epochs) if epochs is not None else count()
        self._rows = (prompt for number in passes for prompt in reader.epoch(number))

    def skip(self, count: int) -> None:
        """Pass over prompts that were drawn before."""
        deque(islice(self._rows, count), maxlen=0)

    def draw(self, count: int) -> tuple[Prompt, ...]:
        """Return the next prompts; fewer than asked for means that the last pass is through."""
        return tuple(islice(self._rows, count))


class PromptSources:
    """The prompts to train on, by data set."""

    def __init__(self, sources: Mapping[str, PromptSource]) -> None:
        self._sources = sources

    def skip(self, counts: Mapping[str, int]) -> None:
        """Pass over prompts that were drawn before."""
        for name, drawn in counts.items():
            self._sources[name].skip(drawn)

    def draw(self, name: str, count: int) -> tuple[Prompt, ...]:
        """Return the next prompts of a data set; fewer than asked for: they are through."""
        return self._sources[name].draw(count)


class DataSets:
    """All data sets of a recipe, by name."""

    def __init__(self, readers: Mapping[str, PromptReader]) -> None:
        self._readers = readers

    def source(self, name: str, *, epochs: int | None) -> PromptSource:
        """Return the prompts of a data set for training."""
        return PromptSource(self._readers[name], name=name, epochs=epochs)

    def sources(self, names: Iterable[str], *, epochs: int | None) -> PromptSources:
        """Return the prompts of some data sets for training, each for so many passes."""
        return PromptSources({name: self.source(name, epochs=epochs) for name in names})

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

    def first_passes(self, names: Iterable[str]) -> dict[str, tuple[Prompt, ...]]:
        """Return every row of some data sets, for an evaluation."""
        return {name: tuple(self._readers[name].epoch(0)) for name in names}

    def size(self, name: str) -> int:
        """Return the number of rows of a data set."""
        return len(self._readers[name])
