"""The prompts that wait to be asked for: read ahead by data set, mixed, and selected."""

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from astraflow.core.algorithms.curation import Curator, Mixing
from astraflow.core.algorithms.finding import Faults
from astraflow.core.batches import IssuedPrompt
from astraflow.core.effects import DrawAgain, DrawPrompts, Effects
from astraflow.core.errors import Failure, Reason
from astraflow.core.ids import PromptId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.settings import RunSettings
from astraflow.core.tasks import Prompt
from astraflow.core.work.failures import DeadLetters

_DEAD_IN_A_ROW = 64


@dataclass(slots=True, kw_only=True)
class _DataSet:
    """What was read of one data set.

    Attributes:
        prompts: Read and not looked at.
        drawn_count: Read so far.
        is_drawing: Whether more were asked for.
        is_through: Whether the last one was read.
    """

    prompts: deque[Prompt] = field(default_factory=deque[Prompt])
    drawn_count: int = 0
    is_drawing: bool = False
    is_through: bool = False

    @property
    def has_more(self) -> bool:
        """Whether a prompt is here or will come."""
        return bool(self.prompts) or not self.is_through


class PromptQueue:
    """Gives out one prompt after the other, in an order that depends on events alone.

    Attributes:
        curator: Decides what is worth its rollouts.
        epochs: Passes completed, by data set.
    """

    def __init__(
        self,
        settings: RunSettings,
        *,
        faults: Faults,
        dead_letters: DeadLetters,
        lifecycle: RunLifecycle,
        effects: Effects,
    ) -> None:
        rollouts = settings.rollouts
        self._row_count, self._max_skips = rollouts.row_count, rollouts.max_skips
        self._dead_letters = dead_letters
        self._lifecycle = lifecycle
        self._effects = effects
        self.epochs: dict[str, int] = {}
        self._mixing = Mixing(rollouts.mix)
        self._data_sets = {name: _DataSet() for phase in rollouts.mix for name in phase.weights}
        self.curator = Curator(rollouts.selectors, seed=settings.seed, faults=faults)
        batches = [policy.groups_per_batch for policy in settings.policies]
        # Enough for every slot that one event can free, so that no slot waits for a prompt.
        self._draw_count = 2 * max(batches)
        self._admitted: list[Prompt] = []
        # Rolled back: on their way here again, and here; in the order of their first issue.
        self._lost: list[IssuedPrompt] = []
        self._again: list[tuple[int, Prompt]] = []
        self._lost_numbers: set[int] = set()
        self._seen_count = self._asked_count = self._forced_count = 0
        self._skipped_in_a_row = self._dead_in_a_row = 0
        self._warm_up_left: int | None = None

    @property
    def has_prompt(self) -> bool:
        read = any(data_set.prompts for data_set in self._data_sets.values())
        return not self._lost and bool(self._again or self._admitted or read)

    @property
    def is_through(self) -> bool:
        if self._admitted or self._lost or self._again:
            return False
        for data_set in self._data_sets.values():
            if data_set.prompts or not data_set.is_through:
                return False
        return True

    @property
    def drawn_counts(self) -> dict[str, int]:
        return {name: data_set.drawn_count for name, data_set in self._data_sets.items()}

    def offer(self, prompts: tuple[Prompt, ...], *, data_set: str, is_last: bool) -> None:
        """Take prompts that the hub read; no name of a data set: the first one."""
        into = self._data_sets[data_set or next(iter(self._data_sets))]
        into.is_drawing = False
        into.prompts.extend(prompts)
        into.drawn_count += len(prompts)
        into.is_through |= is_last
        if is_last and prompts:
            self.epochs[prompts[-1].data_set] = prompts[-1].epoch + 1

    def lose(self, issued: Sequence[IssuedPrompt]) -> None:
        """Let prompts whose rollouts were rolled back be drawn again, before all others.

        Args:
            issued: In the order of their issue. One that another policy lost before is passed over.
        """
        if issued:
            self.curator.forget({each.number for each in issued})
        new = [each for each in issued if each.number not in self._lost_numbers]
        if new:
            self._lost_numbers.update(each.number for each in new)
            self._lost += new
            self._effects.do(DrawAgain(prompts=tuple(self._lost)))

    def offer_again(self, prompts: tuple[Prompt, ...]) -> None:
        """Take prompts that were lost; what came before is passed over."""
        wanted = {(each.data_set, each.epoch, each.prompt_id): each for each in self._lost}
        for prompt in prompts:
            issued = wanted.pop((prompt.data_set, prompt.epoch, prompt.prompt_id), None)
            if issued is not None and prompt.prompt_id not in self._dead_letters:
                insort(self._again, (issued.number, prompt), key=lambda each: each[0])
        self._lost = list(wanted.values())

    def peek(self, count: int) -> Sequence[Prompt]:
        """Return up to so many of the next prompts; fewer: others have to be read first.

        While lost ones are on their way nothing comes before them: what a step is trained on does
        not depend on whether its trainer was killed.
        """
        if self._lost:
            return ()
        while len(self._again) + len(self._admitted) < count:
            prompt = self._next()
            if prompt is None:
                break
            if self._admits(prompt):
                self._mixing.counts[prompt.data_set] += 1
                self._admitted.append(prompt)
        again = [prompt for _, prompt in self._again[:count]]
        return [*again, *self._admitted[: count - len(again)]]

    def take(self, index: int) -> Prompt:
        """Take one of those that `peek` returned."""
        later = index - len(self._again)
        prompt = self._admitted.pop(later) if later >= 0 else self._again.pop(index)[1]
        self.epochs[prompt.data_set] = max(self.epochs.get(prompt.data_set, 0), prompt.epoch)
        return prompt

    def put_first(self, prompt: Prompt) -> None:
        """Give a prompt out before all others, but for those that were rolled back."""
        self._admitted.insert(0, prompt)

    def has_admitted(self, prompt_id: PromptId) -> bool:
        """Whether a prompt is about to be given out."""
        here = (*self._admitted, *(prompt for _, prompt in self._again))
        return any(prompt.prompt_id == prompt_id for prompt in here)

    def begin_version(self, version: int) -> None:
        """Let weights and selectors know of a version of the workflow's first policy."""
        self._mixing.begin_version(version)
        if version < 1:
            return
        if self._warm_up_left is None:
            self._warm_up_left = self._row_count
        self.curator.begin_version(version)

    def draw(self) -> None:
        """Ask for more of what this phase is short of."""
        short = {
            name: data_set
            for name, data_set in self._data_sets.items()
            if len(data_set.prompts) < self._draw_count
            and not (data_set.is_through or data_set.is_drawing)
        }
        if not short:
            return
        there = [name for name, data_set in self._data_sets.items() if data_set.has_more]
        for name in self._mixing.weights(there):
            if name in short:
                short[name].is_drawing = True
                self._ask(name)

    def draw_again(self) -> None:
        """Ask again for what was asked for and did not come."""
        for name, data_set in self._data_sets.items():
            if data_set.is_drawing:
                self._ask(name)
        if self._lost:
            self._effects.do(DrawAgain(prompts=tuple(self._lost)))

    def metrics(self) -> Mapping[str, float]:
        if not self.curator.selectors and len(self._data_sets) == 1:
            return {}
        seen, admitted = self._seen_count, self._asked_count
        return {
            "data/select/seen": float(seen),
            "data/select/skipped": float(seen - admitted),
            "data/select/forced": float(self._forced_count),
            "data/select/skipped_frac": (seen - admitted) / max(1, seen),
            **self._mixing.metrics(),
            **self.curator.metrics(),
        }

    def _next(self) -> Prompt | None:
        there = [name for name, data_set in self._data_sets.items() if data_set.has_more]
        if not there:
            return None
        prompts = self._data_sets[self._mixing.choose(there)].prompts
        while prompts:
            prompt = prompts.popleft()
            if prompt.prompt_id not in self._dead_letters:
                self._dead_in_a_row = 0
                return prompt
            self._dead_in_a_row += 1
            if self._dead_in_a_row > 2 * len(self._dead_letters) + _DEAD_IN_A_ROW:
                self._lifecycle.fail(
                    Failure(
                        reason=Reason.PROMPT_POISONED,
                        message=f"the last {self._dead_in_a_row} prompts are dead letters, each "
                        "given up before; `astraflow ledger` says why",
                    )
                )
        return None

    def _admits(self, prompt: Prompt) -> bool:
        """Ask the selectors; after too many refusals in a row a prompt needs no admission."""
        self._seen_count += 1
        if self._warm_up_left:
            self._warm_up_left -= 1
            if not self._warm_up_left:
                self.curator.end_warm_up()
        is_admitted = self.curator.admits(prompt)
        if not is_admitted and self._skipped_in_a_row < self._max_skips:
            self._skipped_in_a_row += 1
            return False
        self._forced_count += not is_admitted
        self._asked_count += 1
        self._skipped_in_a_row = 0
        return True

    def _ask(self, name: str) -> None:
        self._effects.do(DrawPrompts(data_set=name, count=2 * self._draw_count))
