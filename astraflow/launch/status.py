"""What a live run does now, for people and machines."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from astraflow.client.control import ControlClient
from astraflow.config.run_dir import RunDir
from astraflow.core.members import MemberRole
from astraflow.core.status import LedgerAccount, RunStatus, WaitReason
from astraflow.launch.progress import nodes_of
from astraflow.launch.status_tables import failures_of, policy_table, pool_table


async def show_status(run_dir: RunDir, *, watch: bool, as_json: bool) -> None:
    """Print the state of a run, once or until it is over.

    Raises:
        AstraflowError: NOT_READY when no hub of this run can be reached.
    """
    endpoint = run_dir.read_endpoint()
    async with ControlClient(endpoint.address, token=endpoint.operator_token) as control:
        if not watch:
            await _show_once(control, metrics=endpoint.metrics_address, as_json=as_json)
        elif as_json:
            async for status in control.watch_run():
                _print_json(status)
        else:
            with Live(auto_refresh=False) as live:
                async for status in control.watch_run():
                    waits = () if status.state.is_final else await _waits(control, status)
                    live.update(tables_of(status, waits), refresh=True)


async def _show_once(control: ControlClient, *, metrics: str, as_json: bool) -> None:
    status = await control.get_run()
    books = await control.ledger.accounts()
    waits = await _waits(control, status)
    if as_json:
        _print_json(status, books=books, waits=waits)
        return
    console = Console()
    console.print(tables_of(status, waits), _books(books))
    addresses = {m.name: m.resources.metrics_address for m in status.members}
    for name, address in {"hub": metrics, **addresses}.items():
        if address:
            console.print(f"[dim]metrics of {name}:[/] http://{address}/metrics")


async def _waits(control: ControlClient, status: RunStatus) -> list[WaitReason]:
    return [w for p in status.policies for w in await control.ledger.explain_wait(p.policy_id)]


def tables_of(status: RunStatus, waits: Sequence[WaitReason]) -> Group:
    """Return the run as people see it: policies, pool, who takes part, what is waited for."""
    lines: list[Table | Text] = [Text(nodes_of(status)), policy_table(status)]
    if any(member.role is MemberRole.RAAS for member in status.members):
        lines.append(pool_table(status))
    lines += failures_of(status.failures)
    lines += [Text(f"{wait.waiter_id} waits: {wait.message}", style="dim") for wait in waits]
    if status.failure is not None:
        lines.append(Text(str(status.failure), style="red"))
    return Group(*lines)


def _books(accounts: tuple[LedgerAccount, ...]) -> Table:
    names = ("issued", "in_flight", "waiting", "fresh", "leased", "trained")
    table = Table("policy", *names, "dropped", "books")
    for account in accounts:
        table.add_row(
            account.policy_id,
            *(f"{getattr(account, name + '_count'):,}" for name in names),
            ", ".join(f"{drop.count:,} {drop.reason}" for drop in account.drops) or "0",
            "[green]add up[/]" if account.is_balanced else "[red]do not add up[/]",
        )
    return table


def _print_json(
    status: RunStatus,
    books: tuple[LedgerAccount, ...] = (),
    waits: list[WaitReason] | None = None,
) -> None:
    fields: dict[str, Any] = asdict(status)
    if books:
        fields["books"] = [asdict(each) | {"balanced": each.is_balanced} for each in books]
    if waits is not None:
        fields["waits"] = [asdict(wait) for wait in waits]
    print(json.dumps(fields, default=_plain), flush=True)  # noqa: T201 - the command's output


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
