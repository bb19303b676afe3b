"""Training: prompts become groups, groups become whole, whole groups go to the buffers."""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from astraflow.core.algorithms.points import GroupOutcome
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.groups import SampleSlot, TrainGroup
from astraflow.core.ids import GroupId, IdGenerator, PolicyId, PromptId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.policy.state import PolicyState
from astraflow.core.pool.sessions import Sessions
from astraflow.core.samples import AcceptedRollout
from astraflow.core.settings import RunSettings
from astraflow.core.status import DeadLetter, RolloutPlace
from astraflow.core.tasks import CancelReason, TaskPurpose, VersionRange
from astraflow.core.work.failures import DeadLetters, FailureLog
from astraflow.core.work.pacing import PolicyPacing
from astraflow.core.work.prompt_queue import PromptQueue
from astraflow.core.work.scheduler import MemberCapacity, Scheduler
from astraflow.core.work.task_table import TaskTable


@dataclass(slots=True, kw_only=True, eq=False)
class Training:
    """Issues training tasks and takes what comes of them."""

    settings: RunSettings
    prompts: PromptQueue
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    scheduler: Scheduler
    tasks: TaskTable
    pacing: PolicyPacing
    failures: FailureLog
    dead_letters: DeadLetters
    ids: IdGenerator
    lifecycle: RunLifecycle
    _again: list[TrainGroup] = field(init=False, default_factory=list[TrainGroup])
    _group_count: int = field(init=False, default=0)
    _failed_in_a_row: int = field(init=False, default=0)
    policy_ids: tuple[PolicyId, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.policy_ids = self.settings.workflow.policy_ids

    @property
    def is_through(self) -> bool:
        """Whether no group will be begun any more."""
        return self.lifecycle.stop is not None or self.prompts.is_through

    @property
    def needs_capacity(self) -> bool:
        """Whether a group could be issued if a RaaS had room for it."""
        return bool((self._again or self.prompts.has_prompt) and self.pacing.target_policies)

    def begin_again(self) -> None:
        """Count groups that fail, or that filters leave nothing of, from now on."""
        self._failed_in_a_row = 0
        for policy in self.policies.values():
            policy.samples.completion.filtered_in_a_row = 0

    def advance(self, now: datetime) -> bool:
        """Issue what there is room for: first what was out before, then new groups.

        Returns:
            Whether the last prompts went by: what is whole may be the last batch.
        """
        if self.lifecycle.is_held or self.lifecycle.is_final:
            return False
        if self._again and not self._issue_all_again(now):
            return False
        if self.lifecycle.stop is not None:
            return False
        is_last = False
        if self.scheduler.has_credit and not self.prompts.is_through:
            while (policies := self.pacing.target_policies) and self._issue_new(policies, now):
                if not self.scheduler.has_credit:
                    break
            is_last = self.prompts.is_through
        if self.pacing.live_policies and self.sessions.pool:
            self.prompts.draw()
        return is_last

    def accept(self, group: TrainGroup, index: int, entry: AcceptedRollout, now: datetime) -> None:
        rollout = entry.rollout
        for policy_id in group.policies:
            policy = self.policies[policy_id]
            policy.samples.accept(group, index, entry)
            if rollout.reward is not None:
                policy.window.rewards.append(rollout.reward)
        group.has_reward |= rollout.reward is not None
        if rollout.failure is not None:
            group.failures.append(rollout.failure.shortened())
        self._finish(group, index, now)

    def queue(self, group: TrainGroup) -> None:
        """Have what is unissued of a group issued again."""
        if group.enqueue():
            # Oldest first: what the trainer needs next.
            insort(self._again, group, key=lambda other: other.number)

    def requeue(self, prompt_id: PromptId) -> None:
        """Issue a dead letter again."""
        if self.lifecycle.is_ending:
            raise AstraflowError(Reason.RUN_ENDED, "the run is over; no prompt is issued any more")
        letter = self.dead_letters.take(prompt_id)
        if letter is not None:
            self.prompts.put_first(letter.prompt)
        elif not self.prompts.has_admitted(prompt_id) and not any(
            group.prompt.prompt_id == prompt_id for group in self.tasks.groups.values()
        ):
            raise AstraflowError(
                Reason.PROMPT_UNKNOWN,
                f"'{prompt_id}' is no dead letter; `astraflow ledger` lists them",
            )

    def give_up(self, group: TrainGroup, index: int, reason: Reason, now: datetime) -> None:
        for policy_id in group.policies:
            self.policies[policy_id].samples.books.drop(RolloutPlace.IN_FLIGHT, reason)
        self._finish(group, index, now)

    def retire(self, policy: PolicyState) -> None:
        """Take a policy whose data ended out of all groups; cancel those that nobody wants."""
        for group in list(self.tasks.groups.values()):
            if not isinstance(group, TrainGroup) or policy.policy_id not in group.policies:
                continue
            policy.samples.withdraw(group, Reason.RUN_ENDED)
            if not group.policies:
                self.tasks.withdraw_group(group, CancelReason.STOP)
        self._again = [group for group in self._again if group.policies]

    def take_back(self, policy: PolicyState) -> None:
        """Count what is out for a policy alone as lost: batches before it are to be made again.

        Where no sample may be older than the weights, prompts so keep the order in which they are
        trained on. A node that waited for a version which nobody has any more would else begin
        with the last ones once there is another.
        """
        for group in list(self.tasks.groups.values()):
            if isinstance(group, TrainGroup) and group.policies == [policy.policy_id]:
                policy.samples.lose(group)
                self.tasks.withdraw_group(group, CancelReason.STALE)
        self._again = [each for each in self._again if each.group_id in self.tasks.groups]

    def _issue_new(self, policies: list[PolicyState], now: datetime) -> bool:
        size = self.settings.rollouts.group_size
        # A prompt is chosen when there is room for it, by all that is known then.
        first = self.prompts.peek(1)
        if not first:
            return False
        versions = self._versions(policies, is_open=False)
        place = self.scheduler.find(first[0], size, policies, versions, now)
        if place is None:
            return False
        prompt = self.scheduler.take_prompt(self.prompts, first[0], place.member)
        self._group_count += 1
        group = TrainGroup(
            group_id=GroupId(self.ids.next("group")),
            prompt=prompt,
            workflow_id=self.settings.rollouts.workflow_id,
            purpose=TaskPurpose.TRAIN,
            slots=[SampleSlot() for _ in range(size)],
            number=self._group_count,
            policies=[policy.policy_id for policy in policies],
        )
        self.tasks.open(group)
        for policy in policies:
            policy.samples.admit(group)
        self._send(group, place, versions, now)
        if group.unissued and not self._issue_again(group, now):
            self.queue(group)
        return True

    def _issue_all_again(self, now: datetime) -> bool:
        """Issue what was out before; False when some of it needs the next room that is free."""
        apart: list[TrainGroup] = []
        while self._again:
            group = self._again[0]
            if not self._issue_again(group, now):
                if not self.scheduler.is_suspect(group):
                    break
                apart.append(group)
            del self._again[0]
        is_done = not self._again
        self._again[:0] = apart
        return is_done

    def _issue_again(self, group: TrainGroup, now: datetime) -> bool:
        """Issue what is unissued; False when some of it has to wait."""
        while group.unissued:
            policies = [self.policies[policy_id] for policy_id in group.policies]
            versions = self._versions(policies, is_open=True)
            place = self.scheduler.find(
                group.prompt,
                len(group.unissued),
                policies,
                versions,
                now,
                is_suspect=self.scheduler.is_suspect(group),
            )
            if place is None:
                return False
            self._send(group, place, versions, now)
        group.is_queued = False
        return True

    def _send(
        self,
        group: TrainGroup,
        place: MemberCapacity,
        versions: dict[PolicyId, VersionRange],
        now: datetime,
    ) -> None:
        most = min(place.free, self.sessions.capacity_index.unit)
        indexes = tuple(group.unissued[:most])
        repeats = self.tasks.send(group, place.member, indexes=indexes, versions=versions, now=now)
        for policy_id in group.policies if repeats else ():
            self.policies[policy_id].samples.books.note(reissued=repeats)

    def _versions(
        self, policies: Iterable[PolicyState], *, is_open: bool
    ) -> dict[PolicyId, VersionRange]:
        ranges = dict.fromkeys(self.policy_ids, VersionRange())
        for policy in policies:
            oldest = self.pacing.min_version(policy, is_open=is_open)
            ranges[policy.policy_id] = VersionRange(min=oldest)
        return ranges

    def _finish(self, group: TrainGroup, index: int, now: datetime) -> None:
        group.finish(index)
        if group.open_count:
            return
        self.tasks.close(group)
        if self.prompts.curator.selectors:
            self.prompts.curator.note(group.number, _outcome(group))
        for policy_id in group.policies:
            self.policies[policy_id].samples.complete(group, now - self.lifecycle.start_time)
        is_failed = bool(group.failures) and not group.has_reward
        if is_failed or group.loss_count >= self.settings.rollouts.max_lost:
            self._bury(group, now)
        self._failed_in_a_row = self._failed_in_a_row + 1 if is_failed else 0
        if self._failed_in_a_row >= self.settings.rollouts.max_failed_groups:
            last = group.failures[-1]
            self.lifecycle.fail(
                Failure(
                    reason=last.reason,
                    message=f"all rollouts of {self._failed_in_a_row} groups in a row failed; "
                    f"the last one: {last.message}",
                    metadata=last.metadata,
                    cause=last.cause,
                    traceback=last.traceback or self.failures.traceback_of(last.cause),
                )
            )
        self._fail_when_filtered()

    def _bury(self, group: TrainGroup, now: datetime) -> None:
        """Give up a prompt of which every rollout failed, or that lost member after member."""
        self.dead_letters.add(
            DeadLetter(
                prompt=group.prompt,
                attempt_count=max(slot.issue_count for slot in group.slots),
                failures=tuple(group.failures),
                create_time=now,
            )
        )

    def _fail_when_filtered(self) -> None:
        """Let filters that leave nothing to anybody for too long end the run."""
        live = [policy.samples.completion for policy in self.pacing.live_policies]
        count = min((each.filtered_in_a_row for each in live), default=0)
        if count >= self.settings.rollouts.max_filtered_groups:
            self.lifecycle.fail(
                Failure(
                    reason=Reason.FILTERED,
                    message=f"filters left too little of the last {count} groups "
                    f"(rollouts.max_filtered_groups), of the last one {live[0].last_filter}: "
                    "no batch would ever be full; look at the rewards (all alike?) and at what "
                    "the filters drop (data/filter/* in `astraflow status`)",
                )
            )


def _outcome(group: TrainGroup) -> GroupOutcome:
    """Return what a whole group came to, each rollout counted once whoever trains on it."""
    found = {
        index: sample.entry.rollout.reward
        for samples in group.samples.values()
        for index, sample in samples.items()
    }
    rewards = [reward for _, reward in sorted(found.items()) if reward is not None]
    return GroupOutcome(prompt=group.prompt, rewards=tuple(rewards))
