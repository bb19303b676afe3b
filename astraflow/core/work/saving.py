"""Saving: one checkpoint of the whole run under one id, to which every trainer has its part.

A trainer saves after its step in progress, or at once while it waits for a batch; the ack of its
newest batch names the checkpoint. The run's own part is what the journal holds then: buffers,
selectors, data positions and versions at these acks, which a trainer that comes back with the
checkpoint takes the books back to.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from astraflow.core.effects import Effects, RunSaved, SendSaveOrder
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.lifecycle import RunLifecycle
from astraflow.core.policy.state import PolicyState
from astraflow.core.pool.sessions import Sessions
from astraflow.core.status import PolicyCheckpoint, SavedRun
from astraflow.core.work.prompt_queue import PromptQueue

# Trainers call those that nobody asked for step_000012.
_NAME = re.compile(r"(?!step_\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KEPT_COUNT = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Saving:
    """Asks trainers for checkpoints, one at a time, and puts together what they wrote.

    Attributes:
        asked: The checkpoint that is asked for; empty: none.
    """

    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    prompts: PromptQueue
    lifecycle: RunLifecycle
    effects: Effects
    _saved: dict[str, SavedRun] = field(init=False, default_factory=dict[str, SavedRun])
    asked: str = field(init=False, default="")
    # Policies that have their part to it, and those whose data ended before they had saved.
    _ordered: tuple[PolicyId, ...] = field(init=False, default=())
    _late: dict[str, tuple[PolicyId, ...]] = field(
        init=False, default_factory=dict[str, tuple[PolicyId, ...]]
    )
    _parts: dict[PolicyId, PolicyCheckpoint] = field(
        init=False, default_factory=dict[PolicyId, PolicyCheckpoint]
    )

    def request(self, checkpoint_id: str) -> None:
        """Ask for a checkpoint; one that is asked for already is given up for it."""
        if not _NAME.fullmatch(checkpoint_id):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"'{checkpoint_id}' is no name for a checkpoint; give letters, digits, '.', '_' "
                "and '-', at most 100, and not step_ with a number: trainers use those",
                metadata={"field": "checkpoint_id"},
            )
        if checkpoint_id in self._saved:
            return
        if self.lifecycle.is_ending:
            raise AstraflowError(Reason.RUN_ENDED, "the run is over; its last weights are saved")
        is_asked = checkpoint_id == self.asked
        self._must_be_here(self._missing if is_asked else self._active)
        if not is_asked:
            self.asked, self._parts = checkpoint_id, {}
            self._ordered = tuple(policy.policy_id for policy in self._active)
            for policy in self._active:
                self.order(policy)

    def find(self, checkpoint_id: str) -> SavedRun | None:
        """Return a checkpoint that was asked for; None: some trainer has yet to save.

        Raises:
            AstraflowError: NOT_READY when a trainer is missing, or another checkpoint came between.
        """
        saved = self._saved.get(checkpoint_id)
        if saved is None and checkpoint_id != self.asked:
            raise AstraflowError(
                Reason.NOT_READY,
                f"checkpoint {self.asked or 'of another name'} was asked for after "
                f"{checkpoint_id}; ask again",
            )
        if saved is None:
            self._must_be_here(self._missing)
            return None
        late = [
            policy
            for policy_id, policy in self.policies.items()
            if policy_id in self._late.get(checkpoint_id, ())
            and not policy.lineage.knows(checkpoint_id)
        ]
        for policy in late:
            if policy.policy_id not in self.sessions.trainers:
                raise AstraflowError(
                    Reason.NOT_READY,
                    f"the data of {policy.policy_id} ended before its trainer had saved "
                    f"{checkpoint_id}; its last checkpoint is there under a name of its own",
                )
        return None if late else saved

    def order(self, policy: PolicyState) -> None:
        """Tell the trainer of a policy what it has yet to save."""
        trainer = self.sessions.trainers.get(policy.policy_id)
        if trainer is not None and self.asked and not self._has(policy):
            self.effects.do(SendSaveOrder(member_id=trainer.member_id, checkpoint_id=self.asked))

    def note(self, policy: PolicyState, checkpoint_id: str) -> None:
        if checkpoint_id and checkpoint_id == self.asked and not self._has(policy):
            self._parts[policy.policy_id] = _part(policy)

    def advance(self, now: datetime) -> None:
        """See whether every trainer has saved."""
        if self._missing:
            return
        policies = self.policies.values()
        saved = SavedRun(
            checkpoint_id=self.asked,
            policies=tuple(self._parts.get(each.policy_id) or _part(each) for each in policies),
            drawn_counts=self.prompts.drawn_counts,
            save_time=now,
        )
        self._saved[self.asked] = saved
        self._late = {name: each for name, each in self._late.items() if name in self._saved}
        self._late[self.asked] = tuple(
            each.policy_id
            for each in policies
            if each.policy_id in self._ordered and not self._has(each)
        )
        if len(self._saved) > _KEPT_COUNT:
            del self._saved[next(iter(self._saved))]
        self.asked, self._parts = "", {}
        self.effects.do(RunSaved(saved=saved))

    @property
    def _active(self) -> list[PolicyState]:
        """Policies whose data goes on; the others wrote their last checkpoint."""
        return [policy for policy in self.policies.values() if policy.end is None]

    @property
    def _missing(self) -> list[PolicyState]:
        return [policy for policy in self._active if not self._has(policy)]

    def _has(self, policy: PolicyState) -> bool:
        return policy.policy_id in self._parts and policy.lineage.knows(self.asked)

    def _must_be_here(self, policies: list[PolicyState]) -> None:
        for policy in policies:
            if self.sessions.trainers.get(policy.policy_id) is None:
                raise AstraflowError(
                    Reason.NOT_READY,
                    f"{policy.policy_id} has no trainer that could save; ask again with the same "
                    "id once it is back",
                    retryable=True,
                )


def _part(policy: PolicyState) -> PolicyCheckpoint:
    newest = policy.versions.newest
    return PolicyCheckpoint(
        policy_id=policy.policy_id,
        step=policy.progress.step,
        version=None if newest is None else newest.version,
        fresh_group_count=len(policy.samples.buffer),
    )
