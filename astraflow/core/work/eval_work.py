"""One evaluation while it runs: what is to be asked, what was answered."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from astraflow.core.errors import Failure, Reason
from astraflow.core.evals import EvalAccumulator, EvalRun, EvalState, overall
from astraflow.core.groups import EvalGroup, SampleSlot
from astraflow.core.ids import EvalRunId, GroupId, IdGenerator, PolicyId
from astraflow.core.rollouts import Rollout
from astraflow.core.settings import SuiteSettings
from astraflow.core.tasks import Prompt, TaskPurpose

# Watchers are woken about so often over one evaluation.
_PROGRESS_COUNT = 16


@dataclass(slots=True, kw_only=True, eq=False)
class EvalWork:
    """One evaluation.

    Attributes:
        versions: That it pins.
        share: Of the pool's credit, while training goes on.
        again: Groups with samples to be issued again.
        stuck_time: Since when nobody can serve the versions; None: somebody can.
        waits_for: What it will fail of unless that changes; None: nothing.
        is_offered: Whether the rows of its data sets are here.
        open_groups: Those with an unanswered sample.
        prompts: That no group was begun for, with the number of their data set in the suite.
        rows: What is here while others are read, by data set.
    """

    eval_run_id: EvalRunId
    suite: SuiteSettings
    versions: Mapping[PolicyId, int]
    share: float
    create_time: datetime
    state: EvalState = EvalState.PENDING
    again: deque[EvalGroup] = field(default_factory=deque[EvalGroup])
    stuck_time: datetime | None = None
    waits_for: Failure | None = None
    is_offered: bool = False
    open_groups: dict[GroupId, EvalGroup] = field(default_factory=dict[GroupId, EvalGroup])
    _finish_time: datetime | None = None
    _failure: Failure | None = None
    _last_failure: Failure | None = None
    prompts: deque[tuple[int, Prompt]] = field(default_factory=deque[tuple[int, Prompt]])
    rows: dict[str, list[Prompt]] = field(init=False, default_factory=dict[str, list[Prompt]])
    _accumulators: list[EvalAccumulator] = field(init=False)
    _shown_count: int = 0

    def __post_init__(self) -> None:
        self._accumulators = [EvalAccumulator(part, 0) for part in self.suite.suite.data_sets]

    @property
    def is_answered(self) -> bool:
        """Whether everything was asked and answered or given up."""
        return self.is_offered and not self.prompts and not self.open_groups

    @property
    def rollout_count(self) -> int:
        return sum(each.prompt_count * each.settings.repeats for each in self._accumulators)

    @property
    def scored_count(self) -> int:
        return sum(each.scored_count for each in self._accumulators)

    @property
    def missing_count(self) -> int:
        return sum(each.missing_count for each in self._accumulators)

    def offer(self, prompts: Mapping[str, tuple[Prompt, ...]], *, goes_on: bool) -> None:
        """Take rows of its data sets, all of them once."""
        if self.is_offered:
            return
        for name, those in prompts.items():
            self.rows.setdefault(name, []).extend(those)
        if goes_on:
            return
        self.is_offered = True
        for index, accumulator in enumerate(self._accumulators):
            rows = self.rows.get(accumulator.settings.data_set, ())
            accumulator.prompt_count = len(rows)
            self.prompts.extend((index, row) for row in rows)
        self.rows.clear()

    @property
    def next_size(self) -> int:
        """Repeats of the next prompt; 0: there is none."""
        return self._accumulators[self.prompts[0][0]].settings.repeats if self.prompts else 0

    def begin_group(self, ids: IdGenerator) -> EvalGroup:
        index, prompt = self.prompts.popleft()
        settings = self._accumulators[index].settings
        group = EvalGroup(
            group_id=GroupId(ids.next("eval-group")),
            prompt=prompt,
            workflow_id=settings.workflow_id,
            purpose=TaskPurpose.EVAL,
            slots=[SampleSlot() for _ in range(settings.repeats)],
            eval_run_id=self.eval_run_id,
            data_set_index=index,
            sampling=self.suite.sampling,
        )
        self.open_groups[group.group_id] = group
        if self.state is EvalState.PENDING:
            self.state = EvalState.RUNNING
        return group

    def score(self, group: EvalGroup, rollout: Rollout) -> None:
        """Count one answered rollout; one without a reward is missing."""
        accumulator = self._accumulators[group.data_set_index]
        if rollout.reward is None:
            accumulator.missing_count += 1
            self._last_failure = rollout.failure or self._last_failure
        else:
            group.rewards.append(rollout.reward)
            accumulator.add(rollout.reward, rollout.metrics)
        self._close_if_whole(group)

    def miss(self, group: EvalGroup) -> None:
        self._accumulators[group.data_set_index].missing_count += 1
        self._last_failure = group.failures[-1] if group.failures else self._last_failure
        self._close_if_whole(group)

    def is_worth_showing(self) -> bool:
        """Whether it moved on by enough since this last said so."""
        count = self.scored_count + self.missing_count
        if count - self._shown_count < max(1, self.rollout_count // _PROGRESS_COUNT):
            return False
        self._shown_count = count
        return True

    def conclude(self, now: datetime) -> None:
        if self.scored_count or not self.rollout_count:
            self.end(EvalState.SUCCEEDED, now)
        else:
            self.end(EvalState.FAILED, now, self._last_failure or Failure(reason=Reason.INTERNAL))

    def end(self, state: EvalState, now: datetime, failure: Failure | None = None) -> None:
        self.state, self._finish_time, self._failure = state, now, failure
        self.prompts.clear()
        self.rows.clear()
        self.again.clear()
        self.open_groups.clear()

    def view(self) -> EvalRun:
        results = tuple(each.result() for each in self._accumulators if each.scored_count)
        return EvalRun(
            eval_run_id=self.eval_run_id,
            suite=self.suite.suite.suite,
            versions=self.versions,
            state=self.state,
            rollout_count=self.rollout_count,
            scored_count=self.scored_count,
            missing_count=self.missing_count,
            results=results,
            overall=overall(results),
            failure=self._failure or (None if self.state.is_final else self.waits_for),
            create_time=self.create_time,
            finish_time=self._finish_time,
        )

    def _close_if_whole(self, group: EvalGroup) -> None:
        if not group.open_count:
            self._accumulators[group.data_set_index].close(group.rewards)
            del self.open_groups[group.group_id]
