"""The books of a run, as people see them."""

from datetime import UTC, datetime

from rich.console import Console

from astraflow.core.errors import Failure, Reason
from astraflow.core.status import DeadLetter
from astraflow.core.tasks import Prompt
from astraflow.dataflow.audit import LawCheck
from astraflow.launch.ledger import Ledger, _show


def test_ids_and_faults_are_shown_as_they_are():
    letter = DeadLetter(
        prompt=Prompt(prompt_id="[/b] [red]", data_set="train", fields={}),
        attempt_count=1,
        failures=(Failure(reason=Reason.MEMBER_LOST),),
        create_time=datetime(2026, 1, 1, tzinfo=UTC),
    )
    ledger = Ledger(
        source="journal",
        run_id="r",
        records=(0, 1),
        accounts=(),
        checks=(LawCheck(name="books add up", faults=("solver: [a] is not [/b]",)),),
        counts={},
        dead_letters=(letter,),
    )
    console = Console(record=True, width=120)
    _show(ledger, console)
    shown = console.export_text()
    assert "[/b] [red]: MEMBER_LOST x 1" in shown
    assert "solver: [a] is not [/b]" in shown
