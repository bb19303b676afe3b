"""Training: prompts become groups, groups become whole, whole groups go to the buffers."""

from bisect import insort
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from astraflow.core.algorithms.points import GroupOutcome
from astraflow.core.capacity import size_of
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.groups import SampleSlot, TrainGroup
from astraflow.core.ids import GroupId, PolicyId, PromptId
from astraflow.core.pacing import live_policies, newest_available, target_policies
from astraflow.core.policies import PolicyState
from astraflow.core.prompt_queue import PromptQueue
from astraflow.core.samples import AcceptedRollout
from astraflow.core.scheduler import (
    MemberCapacity,
    Scheduler,
    TaskSender,
    is_slow,
    is_suspect,
    pick,
)
from astraflow.core.state import State
from astraflow.core.status import DeadLetter
from astraflow.core.tasks import CancelReason, Prompt, TaskPurpose, VersionRange

# Prompts that a slow RaaS may choose from, and how often the first one is passed over.
_LOOK_AHEAD: Final = 8


class Training:
    """Issues training tasks and takes what comes of them.

    Attributes:
        prompts: That wait to be asked for.
    """

    def __init__(self, state: State, sender: TaskSender) -> None:
        self._state = state
        self._sender = sender
        self._workflow = state.settings.workflow
        self.prompts = PromptQueue(state)
        self._again: list[TrainGroup] = []
        self._passed_count = 0
        self._scheduler = Scheduler(state)
        self._unit = state.settings.rollouts.unit
        self._group_count = 0
        self._failed_in_a_row = 0

    @property
    def is_through(self) -> bool:
        """Whether no group will be begun any more."""
        return self._state.lifecycle.stop is not None or self.prompts.is_through

    @property
    def needs_capacity(self) -> bool:
        """Whether a group could be issued if a RaaS had room for it."""
        return bool((self._again or self.prompts.has_prompt) and target_policies(self._state))

    def advance(self, now: datetime) -> None:
        """Issue what there is room for: first what was out before, then new groups."""
        if self._state.lifecycle.is_paused or self._state.lifecycle.is_final:
            return
        if not self._issue_all_again(now) or self._state.lifecycle.stop is not None:
            return
        while target_policies(self._state) and self._issue_new(now):
            pass
        if live_policies(self._state) and self._state.sessions.pool:
            self.prompts.draw()

    def accept(self, group: TrainGroup, index: int, entry: AcceptedRollout, now: datetime) -> None:
        """Take one rollout of a group."""
        rollout = entry.rollout
        for policy_id in group.policies:
            policy = self._state.policies[policy_id]
            policy.accept(group, index, entry)
            if rollout.reward is not None:
                policy.window.add_reward(rollout.reward)
        group.has_reward |= rollout.reward is not None
        if rollout.failure is not None:
            group.failures.append(rollout.failure)
        self._finish(group, index, now)

    def queue(self, group: TrainGroup) -> None:
        """Have what is unissued of a group issued again."""
        if not group.is_queued:
            group.is_queued = True
            # Oldest first: what the trainer needs next.
            insort(self._again, group, key=lambda other: other.number)

    def requeue(self, prompt_id: PromptId) -> None:
        """Issue a dead letter again.

        Raises:
            AstraflowError: PROMPT_UNKNOWN, RUN_ENDED.
        """
        if self._state.lifecycle.is_final or self._state.lifecycle.stop is not None:
            raise AstraflowError(Reason.RUN_ENDED, "the run is over; no prompt is issued any more")
        letter = self._state.dead_letters.take(prompt_id)
        if letter is not None:
            self.prompts.put_first(letter.prompt)
        elif not self.prompts.has_admitted(prompt_id) and not any(
            group.prompt.prompt_id == prompt_id for group in self._state.groups.values()
        ):
            raise AstraflowError(
                Reason.PROMPT_UNKNOWN,
                f"'{prompt_id}' is no dead letter; `astraflow ledger` lists them",
            )

    def give_up(self, group: TrainGroup, index: int, reason: Reason, now: datetime) -> None:
        """Drop a sample that failed too often."""
        for policy_id in group.policies:
            self._state.policies[policy_id].give_up(reason)
        self._finish(group, index, now)

    def retire(self, policy: PolicyState) -> None:
        """Take a policy whose data ended out of all groups; cancel those that nobody wants."""
        for group in list(self._state.groups.values()):
            if not isinstance(group, TrainGroup) or policy.policy_id not in group.policies:
                continue
            policy.withdraw(group, Reason.RUN_ENDED)
            group.policies.remove(policy.policy_id)
            if not group.policies:
                self._sender.withdraw_group(group, CancelReason.STOP)
        self._again = [group for group in self._again if group.policies]

    def take_back(self, policy: PolicyState) -> None:
        """Count what is out for a policy alone as lost: batches before it are to be made again.

        Where no sample may be older than the weights, prompts so keep the order in which they are
        trained on. A node that waited for a version which nobody has any more would else begin
        with the last ones once there is another.
        """
        for group in list(self._state.groups.values()):
            if isinstance(group, TrainGroup) and group.policies == [policy.policy_id]:
                policy.lose(group)
                self._sender.withdraw_group(group, CancelReason.STALE)
        self._again = [each for each in self._again if each.group_id in self._state.groups]

    def _issue_new(self, now: datetime) -> bool:
        size = self._state.settings.rollouts.group_size
        # A prompt is chosen when there is room for it, by all that is known then.
        first = self.prompts.peek(1) if self._has_credit(self._unit) else ()
        if not first:
            return False
        policies = target_policies(self._state)
        versions = self._versions(policies, is_open=False)
        place = self._scheduler.find(first[0], size, policies, versions, now)
        if place is None:
            return False
        prompt = self._take_prompt(place)
        self._group_count += 1
        group = TrainGroup(
            group_id=GroupId(self._state.ids.next("group")),
            prompt=prompt,
            workflow_id=self._workflow.workflow_id,
            purpose=TaskPurpose.TRAIN,
            slots=[SampleSlot() for _ in range(size)],
            number=self._group_count,
            policies=[policy.policy_id for policy in policies],
        )
        self._state.groups[group.group_id] = group
        for policy in policies:
            policy.admit(group)
        self._send(group, place, versions, now)
        if group.unissued and not self._issue_again(group, now):
            self.queue(group)
        return True

    def _has_credit(self, count: int) -> bool:
        """Whether anybody has credit for a group, or for some of it where nobody ever has more."""
        sessions = self._state.sessions
        if sessions.capacity_index.has_credit(count):
            return True
        if not sessions.capacity_index.has_credit(1):
            return False
        return not any(member.max_outstanding >= count for member in sessions.pool)

    def _take_prompt(self, place: MemberCapacity) -> Prompt:
        """Take the next prompt; a slow RaaS gets a short one of the next few."""
        measured = self._state.measured
        may_pass = self._passed_count < _LOOK_AHEAD
        slow = may_pass and is_slow(place.member, measured.fastest_token_s)
        sizes = [size_of(prompt) for prompt in self.prompts.peek(_LOOK_AHEAD if slow else 1)]
        index = pick(sizes, mean=measured.mean_size, is_slow=slow)
        self._passed_count = self._passed_count + 1 if index else 0
        measured.note_prompt(sizes[index])
        return self.prompts.take(index)

    def _issue_all_again(self, now: datetime) -> bool:
        """Issue what was out before; False when some of it needs the next room that is free."""
        apart: list[TrainGroup] = []
        while self._again:
            group = self._again[0]
            if not self._issue_again(group, now):
                if not self._is_suspect(group):
                    break
                apart.append(group)
            del self._again[0]
        is_done = not self._again
        self._again[:0] = apart
        return is_done

    def _is_suspect(self, group: TrainGroup) -> bool:
        return is_suspect(group, self._state.settings.rollouts.max_lost)

    def _issue_again(self, group: TrainGroup, now: datetime) -> bool:
        """Issue what is unissued; False when some of it has to wait."""
        while group.unissued:
            policies = [self._state.policies[policy_id] for policy_id in group.policies]
            versions = self._versions(policies, is_open=True)
            place = self._scheduler.find(
                group.prompt,
                len(group.unissued),
                policies,
                versions,
                now,
                is_suspect=self._is_suspect(group),
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
        indexes = tuple(group.unissued[: min(place.free, self._unit)])
        repeats = self._sender.send(
            group, place.member, indexes=indexes, versions=versions, now=now
        )
        for policy_id in group.policies:
            self._state.policies[policy_id].books.reissued += repeats

    def _versions(
        self, policies: Iterable[PolicyState], *, is_open: bool
    ) -> dict[PolicyId, VersionRange]:
        ranges = dict.fromkeys(self._workflow.policy_ids, VersionRange())
        for policy in policies:
            ranges[policy.policy_id] = VersionRange(min=self._min_version(policy, is_open=is_open))
        return ranges

    def _min_version(self, policy: PolicyState, *, is_open: bool) -> int:
        """Return the oldest version to ask for; of a policy given up, one that can be had."""
        wanted = policy.open.min_version(is_open=is_open)
        if policy.policy_id not in self._state.barrier.given_up:
            return wanted
        return max(0, min(wanted, newest_available(self._state, policy)))

    def _finish(self, group: TrainGroup, index: int, now: datetime) -> None:
        group.finish(index)
        if group.open_count:
            return
        del self._state.groups[group.group_id]
        self.prompts.curator.note(group.number, _outcome(group))
        for policy_id in group.policies:
            self._state.policies[policy_id].complete(group, now - self._state.start_time)
        is_failed = bool(group.failures) and not group.has_reward
        if is_failed or group.loss_count >= self._state.settings.rollouts.max_lost:
            self._bury(group, now)
        self._count_failed(group, is_failed=is_failed)
        self._fail_when_filtered()

    def _bury(self, group: TrainGroup, now: datetime) -> None:
        """Give up a prompt of which every rollout failed, or that lost member after member."""
        self._state.dead_letters.add(
            DeadLetter(
                prompt=group.prompt,
                attempt_count=max(slot.issue_count for slot in group.slots),
                failures=tuple(group.failures),
                create_time=now,
            )
        )

    def _count_failed(self, group: TrainGroup, *, is_failed: bool) -> None:
        """Let too many failed groups in a row end the run."""
        state = self._state
        self._failed_in_a_row = self._failed_in_a_row + 1 if is_failed else 0
        if self._failed_in_a_row >= state.settings.rollouts.max_failed_groups:
            last = group.failures[-1]
            state.lifecycle.failure = Failure(
                reason=last.reason,
                message=f"all rollouts of {self._failed_in_a_row} groups in a row failed; "
                f"the last one: {last.message}",
                metadata=last.metadata,
                cause=last.cause,
                traceback=last.traceback or state.failures.traceback_of(last.cause),
            )

    def _fail_when_filtered(self) -> None:
        """Let filters that leave nothing to anybody for too long end the run."""
        live = [policy.completion for policy in live_policies(self._state)]
        count = min((each.filtered_in_a_row for each in live), default=0)
        if count >= self._state.settings.rollouts.max_filtered_groups:
            self._state.lifecycle.fail(
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
