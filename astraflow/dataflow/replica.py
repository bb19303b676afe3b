"""A replica of a run: what its journal comes to, in a hub that returns or any other process."""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from astraflow.core.decisions import Decision
from astraflow.core.effects import EvalChanged, RecordBatch, RunSaved
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import Event, HubRestarted
from astraflow.core.run import Run
from astraflow.dataflow.memory import Memory
from astraflow.dataflow.recorder import Line
from astraflow.storage.snapshot import read_snapshot, write_snapshot
from astraflow.wire.journal import read_record
from astraflow.wire.journal_events import RunOpened
from astraflow.wire.snapshot import dump_state, load_state
from astraflow.workflows.registry import see_working_directory

# Whose objects a snapshot holds.
_MODULES = (
    "astraflow.core.",
    "astraflow.dataflow.memory:",
    "astraflow.dataflow.roster:",
    "astraflow.rpc.tokens:",
    "astraflow.wire.journal_events:RunOpened",
)

Begin = Callable[[RunOpened, datetime], Run]
Look = Callable[[Event, Decision], None]


class Replica:
    """Follows the records of one run.

    Attributes:
        opened: Which run it is.
        run: Its state.
        memory: What is known of its members.
        position: Of the next record.
        software: Release that wrote the records up to there.
        lines: What people were to be told in metrics, evaluations and checkpoints.
    """

    def __init__(self, opened: RunOpened, run: Run, memory: Memory, *, position: int) -> None:
        self.opened = opened
        self.run = run
        self.memory = memory
        self.position = position
        self.software = opened.software
        self.lines: list[tuple[Line, datetime]] = []

    @classmethod
    def load(cls, path: Path) -> "Replica | None":
        """Return the replica of a snapshot; None: there is none.

        Raises:
            AstraflowError: JOURNAL_FAILED when it is damaged or of another release.
        """
        data = read_snapshot(path)
        if data is None:
            return None
        # Algorithms of the user's own may lie beside them.
        see_working_directory()
        (opened, run, memory), position = load_state(data, modules=_MODULES)
        return cls(opened, run, memory, position=position)

    @classmethod
    def begin(cls, record: bytes, begin: Begin) -> "Replica":
        """Return the replica of a journal's first record.

        Raises:
            AstraflowError: JOURNAL_FAILED when it is no first record; what `begin` raises.
        """
        recorded = read_record(record)
        opened = recorded.entry
        if not isinstance(opened, RunOpened):
            raise AstraflowError(
                Reason.JOURNAL_FAILED,
                "the journal does not begin with its run, and its snapshot is missing; restore the "
                "whole folder from a copy",
            )
        return cls(opened, begin(opened, recorded.time), Memory(), position=1)

    def save(self, path: Path) -> None:
        """Write a snapshot.

        Raises:
            AstraflowError: JOURNAL_FAILED when it cannot be written.
        """
        whole = (self.opened, self.run, self.memory)
        write_snapshot(path, dump_state(whole, position=self.position, modules=_MODULES))

    def take(self, record: bytes, look: Look | None = None) -> None:
        """Let happen what the next record says.

        Raises:
            AstraflowError: JOURNAL_FAILED when it cannot be, which is another release's journal.
        """
        recorded = read_record(record)
        event, time = recorded.entry, recorded.time
        if isinstance(event, RunOpened):
            raise self._refusal("a second run begins")
        if isinstance(event, HubRestarted):
            self.software = event.software or self.software
        try:
            decision = self.run.apply(event, time, goes_on=recorded.goes_on)
        except AstraflowError as error:
            raise self._refusal(error.message) from error
        if recorded.decision not in (None, decision.digest):
            raise self._refusal("something else is decided here than was then")
        for effect in decision.effects:
            self.memory.see(effect, time)
            if isinstance(effect, RecordBatch | RunSaved) or (
                isinstance(effect, EvalChanged) and effect.eval_run.state.is_final
            ):
                self.lines.append((effect, time))
        self.memory.note(event, decision.answer, time)
        self.position += 1
        if look is not None:
            look(event, decision)

    def _refusal(self, why: str) -> AstraflowError:
        return AstraflowError(
            Reason.JOURNAL_FAILED,
            f"record {self.position} of the journal does not follow from those before it ({why}); "
            f"open it with release {self.software}, which wrote it, and with the code of the "
            "recipe's algorithms that it was written with; `astraflow dataflow compact` of that "
            "release makes a snapshot that a later one goes on from",
            metadata={"position": str(self.position)},
        )
