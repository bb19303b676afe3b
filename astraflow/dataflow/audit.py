"""An audit: checks the books of a run against its journal, by other means than the run's own."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass

from astraflow.core.batches import AckBatch, BatchOutcome, BatchPart
from astraflow.core.effects import CloseSession, Decision, SendBatch, SendTask
from astraflow.core.events import Event, RolloutArrived, TaskFinished, TaskNacked, TrainerRegistered
from astraflow.core.ids import BatchId, MemberId, PolicyId, RolloutId, TaskId
from astraflow.core.members import TrainerRegistration
from astraflow.core.rollouts import Disposition, ItemAck
from astraflow.core.run import Run
from astraflow.core.tasks import TaskPurpose
from astraflow.core.work.intake import UNDONE


@dataclass(frozen=True, slots=True, kw_only=True)
class LawCheck:
    """One law that a run has to keep.

    Attributes:
        faults: What breaks it; empty: it holds.
    """

    name: str
    faults: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.faults


class Audit:
    """Follows what a journal says, from its first record or from a snapshot on.

    Attributes:
        counts: Of what happened, by name.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self._tasks: dict[TaskId, MemberId] = {}
        self._ended: set[TaskId] = set()
        self.accepted: set[RolloutId] = set()
        self._batches: dict[BatchId, set[RolloutId]] = defaultdict(set)
        self._policies: dict[BatchId, PolicyId] = {}
        self._settled: set[BatchId] = set()
        # The rollouts of each trained batch, oldest first.
        self._lineages: dict[PolicyId, list[set[RolloutId]]] = defaultdict(list)
        self._consumed: dict[PolicyId, set[RolloutId]] = defaultdict(set)
        self._task_faults: list[str] = []
        self._rollout_faults: list[str] = []
        # Of what the journal says came for training: a hub records only what it has use for.
        self._recorded: set[RolloutId] = set()
        self._refused: list[str] = []
        self._training: set[TaskId] = set()

    def trained(self, policy_id: PolicyId) -> Set[RolloutId]:
        return self._consumed[policy_id]

    def record(self, event: Event, decision: Decision) -> None:
        self.counts["events"] += 1
        self._record_event(event, decision.answer)
        for effect in decision.effects:
            if isinstance(effect, SendTask):
                if effect.task.task_id in self._ended:
                    self._task_faults.append(f"{effect.task.task_id} is sent after its end")
                self._tasks[effect.task.task_id] = effect.member_id
                if effect.task.purpose is TaskPurpose.TRAIN:
                    self._training.add(effect.task.task_id)
            elif isinstance(effect, CloseSession):
                lost = [t for t, owner in self._tasks.items() if owner == effect.member_id]
                for task_id in lost:
                    self._end(task_id, "tasks_lost")
            elif isinstance(effect, SendBatch):
                self._policies[effect.header.batch_id] = effect.header.policy_id
                for part in effect.parts:
                    self._batches[effect.header.batch_id].update(_fresh(part))

    def checks(self, run: Run) -> tuple[LawCheck, ...]:
        """Return how the laws stand at the end of the journal."""
        unbalanced = tuple(
            f"{account.policy_id}: {account}"
            for account in run.accounts()
            if not account.is_balanced
        )
        left = self._tasks.keys() - run.open_task_ids
        tasks = (*self._task_faults, *(f"{task_id} never ended" for task_id in sorted(left)))
        return (
            LawCheck(name="books add up", faults=unbalanced),
            LawCheck(name="every recorded rollout is in the books", faults=self._lost(run)),
            LawCheck(name="every task ends once", faults=tasks),
            LawCheck(
                name="no rollout is in two trained batches", faults=tuple(self._rollout_faults)
            ),
        )

    def _record_event(self, event: Event, answer: object) -> None:
        match event:
            case RolloutArrived():
                self._record_arrival(event, answer)
                if isinstance(answer, ItemAck) and answer.disposition is Disposition.ACCEPTED:
                    self._accept(event.rollout.rollout_id)
            case TaskFinished():
                if isinstance(answer, ItemAck) and answer.disposition is Disposition.ACCEPTED:
                    self._end(event.result.task_id, "tasks_finished")
            case TaskNacked():
                if event.task_id in self._tasks:
                    self._end(event.task_id, "tasks_given_back")
            case TrainerRegistered():
                if isinstance(answer, TrainerRegistration):
                    self._roll_back(event.request.policy_id, answer.rolled_back_batch_count)
            case AckBatch():
                if answer is True and event.batch_id not in self._settled:
                    self._end_batch(event)
            case _:
                pass

    def _record_arrival(self, event: RolloutArrived, answer: object) -> None:
        rollout = event.rollout
        disposition = answer.disposition if isinstance(answer, ItemAck) else None
        if disposition is Disposition.REJECTED:
            self._refused.append(f"{rollout.rollout_id} was recorded and is refused on replay")
        elif disposition is Disposition.DUPLICATE:
            return
        if rollout.task_id in self._training and rollout.outcome not in UNDONE:
            self._recorded.add(rollout.rollout_id)

    def _lost(self, run: Run) -> tuple[str, ...]:
        """Return what was recorded and is nowhere in the books.

        By count, since the books keep no names of what was trained on; of several policies some
        may have ended, and want nothing of a rollout.
        """
        accounts = run.accounts()
        if len(accounts) != 1:
            return tuple(self._refused)
        [account] = accounts
        placed = account.issued_count - account.in_flight_count
        if placed >= len(self._recorded):
            return tuple(self._refused)
        fault = f"{len(self._recorded)} rollouts are recorded, and the books have {placed}"
        return (fault, *self._refused)

    def _accept(self, rollout_id: RolloutId) -> None:
        self.counts["rollouts_accepted"] += 1
        if rollout_id in self.accepted:
            self._rollout_faults.append(f"{rollout_id} is accepted twice")
        self.accepted.add(rollout_id)

    def _end(self, task_id: TaskId, how: str) -> None:
        if task_id in self._ended:
            self._task_faults.append(f"{task_id} ends twice")
        self._ended.add(task_id)
        self._tasks.pop(task_id, None)
        self.counts[how] += 1

    def _roll_back(self, policy_id: PolicyId, count: int) -> None:
        """Begin another lineage, without the last batches."""
        self.counts["batches_rolled_back"] += count
        lineage = self._lineages[policy_id]
        for rollouts in lineage[max(0, len(lineage) - count) :] if count else ():
            self._consumed[policy_id] -= rollouts
        del lineage[max(0, len(lineage) - count) :]

    def _end_batch(self, event: AckBatch) -> None:
        self._settled.add(event.batch_id)
        rollouts = self._batches.pop(event.batch_id, None)
        if event.outcome is not BatchOutcome.CONSUMED:
            return
        self.counts["batches_trained"] += 1
        if rollouts is None:
            # It was sent before the snapshot.
            return
        policy_id = self._policies[event.batch_id]
        self._lineages[policy_id].append(rollouts)
        trained = self._consumed[policy_id]
        again = rollouts & trained
        self._rollout_faults += [f"{each} is trained on in two batches" for each in sorted(again)]
        trained |= rollouts


def _fresh(part: BatchPart) -> Iterable[RolloutId]:
    """Return the rollouts that are in a batch for the first time; replays do not count."""
    uses = part.values("use_count").tolist()
    return (name for name, count in zip(part.rollout_ids, uses, strict=True) if not count)
