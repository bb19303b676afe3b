"""`astraflow ledger`: the books of a run, checked against its journal."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astraflow.client.control import ControlClient
from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PromptId
from astraflow.core.status import DeadLetter, LedgerAccount
from astraflow.dataflow.audit import Audit, LawCheck
from astraflow.dataflow.journals import is_begun, open_reader
from astraflow.dataflow.recovery import beginning_of, replay

# A hub that compacts its journal meanwhile makes a reading begin anew.
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What is known of the books.

    Attributes:
        source: journal, or hub for one that keeps none.
        run_id: Of the run; empty: the hub did not say.
        records: Events that the journal holds now, oldest position and end; None: no journal.
        accounts: By policy.
        checks: Of the laws.
        dead_letters: Prompts that are issued no more, newest first.
        counts: Of what the journal tells, since its snapshot.
    """

    source: str
    run_id: str
    records: tuple[int, int] | None
    accounts: tuple[LedgerAccount, ...]
    checks: tuple[LawCheck, ...]
    counts: dict[str, int]
    dead_letters: tuple[DeadLetter, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return all(check.holds for check in self.checks)


def show_ledger(run_dir: RunDir, console: Console, *, as_json: bool) -> bool:
    """Print the books of a run; return whether they hold.

    Raises:
        AstraflowError: JOURNAL_FAILED when the journal is damaged; NOT_READY when there is
            neither a journal nor a hub.
    """
    ledger = asyncio.run(read_ledger(run_dir))
    if as_json:
        console.print_json(json.dumps(_to_json(ledger), default=str))
    else:
        _show(ledger, console)
    return ledger.holds


async def read_ledger(run_dir: RunDir) -> Ledger:
    """Return the books of a run, from its journal or, where it has none, from its hub.

    Raises:
        AstraflowError: JOURNAL_FAILED, NOT_READY.
    """
    if not run_dir.recipe.exists():
        return await _ask_hub(run_dir)
    recipe = load_recipe(run_dir.recipe, ())
    if not is_begun(recipe, run_dir):
        return await _ask_hub(run_dir)
    for _ in range(_ATTEMPTS - 1):
        try:
            return await _read_journal(recipe, run_dir)
        except AstraflowError:
            await asyncio.sleep(0.1)
    return await _read_journal(recipe, run_dir)


async def _read_journal(recipe: Recipe, run_dir: RunDir) -> Ledger:
    audit = Audit()
    with open_reader(recipe, run_dir) as (reader, snapshot):
        replica = await replay(reader, snapshot, beginning_of(recipe), observe=audit.record)
        records = (reader.first, reader.end)
    if replica is None:
        return Ledger(
            source="journal", run_id="", records=records, accounts=(), checks=(), counts={}
        )
    return Ledger(
        source="journal",
        run_id=replica.opened.run_id,
        records=records,
        accounts=replica.run.accounts(),
        checks=audit.checks(replica.run),
        dead_letters=tuple(replica.run.dead_letters()),
        counts=dict(audit.counts),
    )


async def _ask_hub(run_dir: RunDir) -> Ledger:
    async with ControlClient.of(run_dir) as control:
        accounts = await control.ledger.accounts()
        letters = tuple([letter async for letter in control.ledger.dead_letters(limit=1000)])
        status = await control.get_run()
    faults = tuple(f"{a.policy_id}: {a}" for a in accounts if not a.is_balanced)
    return Ledger(
        source="hub",
        run_id=status.run_id,
        records=None,
        accounts=accounts,
        checks=(LawCheck(name="books add up", faults=faults),),
        dead_letters=letters,
        counts={},
    )


def _to_json(ledger: Ledger) -> Mapping[str, object]:
    accounts = [asdict(each) | {"balanced": each.is_balanced} for each in ledger.accounts]
    checks = [asdict(check) | {"holds": check.holds} for check in ledger.checks]
    letters = [
        {
            "prompt_id": letter.prompt.prompt_id,
            "data_set": letter.prompt.data_set,
            "attempt_count": letter.attempt_count,
            "create_time": letter.create_time.isoformat(),
            "failures": [{"reason": f.reason, "message": f.message} for f in letter.failures],
        }
        for letter in ledger.dead_letters
    ]
    changes = {"accounts": accounts, "checks": checks, "dead_letters": letters}
    return asdict(replace(ledger, dead_letters=())) | changes | {"holds": ledger.holds}


def _show(ledger: Ledger, console: Console) -> None:
    names = ("issued", "in_flight", "waiting", "fresh", "leased", "trained")
    table = Table("policy", *names, "dropped")
    for account in ledger.accounts:
        dropped = ", ".join(f"{drop.reason.lower()} {drop.count}" for drop in account.drops)
        counts = [str(getattr(account, f"{name}_count")) for name in names]
        table.add_row(account.policy_id, *counts, dropped or "0")
    console.print(table)
    if ledger.records is not None:
        console.print(f"journal: records {ledger.records[0]} to {ledger.records[1]}")
    for name, count in ledger.counts.items():
        console.print(f"{name.replace('_', ' ')}: {count}")
    for letter in ledger.dead_letters[:20]:
        reasons = Counter(failure.reason for failure in letter.failures)
        why = ", ".join(f"{reason} x {count}" for reason, count in reasons.items())
        prompt_id = escape(letter.prompt.prompt_id)
        console.print(f"[yellow]dead letter[/]  {prompt_id}: {why}")
    for check in ledger.checks:
        console.print(f"{'[green]holds[/]' if check.holds else '[red]BROKEN[/]'}  {check.name}")
        for fault in check.faults[:20]:
            console.print(f"        {fault}", markup=False)


async def requeue(run_dir: RunDir, prompt_id: str) -> None:
    """Have the hub of a run issue a dead letter again.

    Raises:
        AstraflowError: PROMPT_UNKNOWN; NOT_READY when the hub is gone.
    """
    async with ControlClient.of(run_dir) as control:
        await control.ledger.requeue(PromptId(prompt_id))
