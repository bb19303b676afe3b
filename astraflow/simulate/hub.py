"""The simulated hub: the run itself on a timeline, its effects passed to simulated members."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from astraflow.core import effects as ef
from astraflow.core import events as ev
from astraflow.core.ids import MemberId, PromptId
from astraflow.core.run import Run
from astraflow.core.settings import RunSettings
from astraflow.core.tasks import Prompt

if TYPE_CHECKING:
    from astraflow.simulate.node import SimulatedNode

Act = Callable[[], None]

START = datetime(2000, 1, 1, tzinfo=UTC)


class Timeline:
    """Runs acts at their times."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.now = START
        self._acts: list[tuple[float, int, Act]] = []
        self._number = 0

    def after(self, seconds: float, act: Act) -> None:
        """Let something happen in so many seconds."""
        self._number += 1
        heappush(self._acts, (self.seconds + seconds, self._number, act))

    def run_until(self, seconds: float) -> int:
        """Do all that is due up to a time; return how many acts it were."""
        count = 0
        while self._acts and self._acts[0][0] <= seconds:
            due, _, act = heappop(self._acts)
            self._move(due)
            act()
            count += 1
        self._move(seconds)
        return count

    def _move(self, seconds: float) -> None:
        if seconds > self.seconds:
            self.seconds = seconds
            self.now = START + timedelta(seconds=seconds)


_TICK_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedHub:
    """One run on a timeline.

    Attributes:
        trainer: Gets batches; set before the first one.
    """

    timeline: Timeline
    settings: RunSettings
    workers: "dict[MemberId, SimulatedNode]" = field(default_factory=dict[MemberId, Any])
    trainer: Callable[[ef.SendBatch], None] | None = None
    event_count: int = 0
    run: Run = field(init=False)
    _prompt_count: int = 0

    def __post_init__(self) -> None:
        self.run = Run(self.settings, start_time=START)
        self.timeline.after(_TICK_S, self._tick)

    @property
    def keep_alive_s(self) -> float:
        """As seldom as a member may speak without being suspect."""
        return 0.6 * self.settings.session_ttl.total_seconds()

    def apply(self, event: ev.Event) -> Any:
        """Let something happen now; return the run's answer."""
        decision = self.run.apply(event, self.timeline.now)
        self.event_count += 1
        for effect in decision.effects:
            self._carry_out(effect)
        return decision.answer

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.SendTask(member_id=member_id, task=task):
                # Delivered after the event, as over a wire; a node that crashed gets nothing.
                self._deliver(member_id, lambda worker: worker.take(task))
            case ef.SendCancellation(member_id=member_id):
                self._deliver(member_id, lambda worker: worker.cancel(effect))
            case ef.SendDirective(member_id=member_id):
                self._deliver(member_id, lambda worker: worker.order(effect))
            case ef.SendBatch() if self.trainer is not None:
                trainer = self.trainer
                self.timeline.after(0.0, lambda: trainer(effect))
            case ef.AnnounceVersion(info=info):
                for worker in self.workers.values():
                    worker.see(info.version)
            case ef.DrawPrompts(count=count, data_set=data_set):
                self.timeline.after(0.0, lambda: self._offer(count, data_set))
            case ef.CloseSession(member_id=member_id):
                self.workers.pop(member_id, None)
            case _:
                pass

    def _deliver(self, member_id: MemberId, act: "Callable[[SimulatedNode], None]") -> None:
        def deliver() -> None:
            worker = self.workers.get(member_id)
            if worker is not None:
                act(worker)

        self.timeline.after(0.0, deliver)

    def _offer(self, count: int, data_set: str) -> None:
        first = self._prompt_count
        self._prompt_count += count
        prompts = tuple(
            Prompt(prompt_id=PromptId(f"p{number}"), data_set=data_set, fields={})
            for number in range(first, first + count)
        )
        self.apply(ev.PromptsOffered(prompts=prompts, data_set=data_set))

    def _tick(self) -> None:
        due = self.run.next_deadline
        if due is not None and due <= self.timeline.now:
            self.apply(ev.Ticked())
        self.timeline.after(_TICK_S, self._tick)
