"""A simulated trainer: works a time on each batch, publishes, acknowledges, and keeps the laws."""

from collections import Counter, deque
from dataclasses import dataclass, field

from astraflow.core import effects as ef
from astraflow.core import events as ev
from astraflow.core.batches import BatchOutcome
from astraflow.core.ids import MemberId
from astraflow.core.members import Contract, RegisterTrainer
from astraflow.core.versions import CodecProfile, PatchInfo, VersionInfo, WeightEndpoint
from astraflow.simulate.hub import SimulatedHub
from astraflow.simulate.node import POLICY
from astraflow.simulate.scenario import Scenario


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedTrainer:
    """The trainer.

    Attributes:
        waited_s: Time without a batch, from the first one on.
        trained_s: Time with one.
        steps: Batches trained on, as (end, seconds waited before, rollouts).
        seen: How often each rollout came in a batch that was trained on.
    """

    scenario: Scenario
    hub: SimulatedHub
    waited_s: float = 0.0
    trained_s: float = 0.0
    steps: list[tuple[float, float, int]] = field(default_factory=list[tuple[float, float, int]])
    seen: Counter[str] = field(default_factory=Counter[str])
    _batches: deque[ef.SendBatch] = field(default_factory=deque[ef.SendBatch])
    _is_busy: bool = False
    _free_since: float | None = None
    _member_id: MemberId = field(default=MemberId(""))

    def start(self) -> None:
        """Register, publish the first weights, and ask for batches."""
        settings = self.scenario.trainer
        request = RegisterTrainer(
            policy_id=POLICY,
            name="trainer",
            contract=Contract(),
            groups_per_batch=settings.groups_per_batch,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint="trainer:1"),),
        )
        secrets = ev.SessionSecrets(token=b"", transfer_token=b"")
        registration = self.hub.apply(ev.TrainerRegistered(request=request, secrets=secrets))
        self._member_id = registration.session.member_id
        self.hub.trainer = self._take
        self._publish(0)
        opened = ev.StreamBatches(member_id=self._member_id, max_outstanding=settings.prefetch)
        self.hub.apply(opened)
        self._speak()

    @property
    def open_wait_s(self) -> float:
        """Seconds of the wait that goes on."""
        since = self._free_since
        return 0.0 if since is None or self._is_busy else self.hub.timeline.seconds - since

    def _take(self, batch: ef.SendBatch) -> None:
        self._batches.append(batch)
        if not self._is_busy:
            self._train(self._batches.popleft())

    def _train(self, batch: ef.SendBatch) -> None:
        # The time up to the first batch is not a wait: there is no pool yet.
        wait_s = self.open_wait_s
        self._is_busy = True
        self.waited_s += wait_s
        now = self.hub.timeline.seconds
        step_s = [d.step_s for d in self.scenario.trainer.demand if d.at_s <= now][-1]
        self.hub.timeline.after(step_s, lambda: self._finish(batch, wait_s, step_s))

    def _finish(self, batch: ef.SendBatch, wait_s: float, step_s: float) -> None:
        timeline = self.hub.timeline
        self.trained_s += step_s
        names = batch.parts.rollout_ids
        self.seen.update(names)
        self.steps.append((timeline.seconds, wait_s, len(names)))
        self._publish(len(self.steps))
        self._is_busy, self._free_since = False, timeline.seconds
        self.hub.apply(
            ev.AckBatch(
                member_id=self._member_id,
                batch_id=batch.header.batch_id,
                outcome=BatchOutcome.CONSUMED,
                step=len(self.steps),
                wait_s=wait_s,
                train_s=step_s,
            )
        )
        if self._batches and not self._is_busy:
            self._train(self._batches.popleft())

    def _publish(self, version: int) -> None:
        patch = PatchInfo(
            base_version=version - 1 if version else None,
            version=version,
            profile=CodecProfile.FAST,
            codec_version=1,
            root_digest=version.to_bytes(32, "little"),
            chunk_count=1,
            payload_nbytes=8,
        )
        info = VersionInfo(
            policy_id=POLICY,
            version=version,
            layout_digest=bytes(32),
            content_digest=version.to_bytes(16, "little"),
            step=version,
            patches=(patch,),
        )
        self.hub.apply(ev.VersionPublished(member_id=self._member_id, info=info))

    def _speak(self) -> None:
        self.hub.apply(ev.MemberKeptAlive(member_id=self._member_id))
        self.hub.timeline.after(self.hub.keep_alive_s, self._speak)
