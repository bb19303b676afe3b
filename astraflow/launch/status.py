"""What a live run does now: tables, live progress, and what each trainer waits for."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from textwrap import indent
from typing import IO, Any, Self

import structlog
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from astraflow.client.control import ControlClient
from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.core.errors import Failure, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import MemberRole, MemberStatus, RaasLoad
from astraflow.core.status import (
    FailureReport,
    LedgerAccount,
    PolicyStatus,
    RunStatus,
    WaitReason,
)
from astraflow.core.work.failures import LEAST_COUNT

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Rewards = Mapping[str, dict[int, float]]

_PLACES = ("in_flight", "waiting", "fresh", "leased", "trained")


async def show_status(run_dir: RunDir, *, watch: bool, as_json: bool) -> None:
    """Print the state of a run, once or until it is over.

    Raises:
        AstraflowError: NOT_READY when no hub of this run can be reached.
    """
    async with ControlClient.of(run_dir) as control:
        if watch and not as_json:
            await _watch(control, run_dir)
            return
        if watch:
            async for status in control.watch_run():
                # The command's output.
                print(status_to_json(status), flush=True)  # noqa: T201
            return
        metrics = run_dir.read_endpoint().metrics_address
        status, books, waits = await _read(control)
    if as_json:
        print(status_to_json(status, books, waits))  # noqa: T201 - the command's output
        return
    console = Console()
    console.print(tables_of(status, waits), *_books(books))
    addresses = {m.name: m.resources.metrics_address for m in status.members}
    for name, address in {"hub": metrics, **addresses}.items():
        if address:
            console.print(f"[dim]metrics of {name}:[/] http://{address}/metrics")


async def _watch(control: ControlClient, run_dir: RunDir) -> None:
    """Fill the terminal with the state of a run until it is over, and leave the last one there."""
    console = Console()
    # What was before is in the run's folder, where this is its machine.
    rewards: Rewards = defaultdict(dict)
    for row in read_json_lines(run_dir.metrics):
        _note(rewards[row["policy"]], row["step"], row.get("reward/mean"))
    shown = Group()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        async for status in control.watch_run():
            is_over = status.state.is_final
            books = () if is_over else await control.ledger.accounts()
            waits = () if is_over else await _waits(control, status)
            for policy in status.policies:
                _note(rewards[policy.policy_id], policy.step, policy.mean_reward)
            shown = Group(tables_of(status, waits, rewards=rewards), *_books(books))
            live.update(shown, refresh=True)
    if console.is_terminal:
        console.print(shown)


def _note(curve: dict[int, float], step: int, reward: float | None) -> None:
    if reward is not None:
        curve[step] = reward


async def _read(
    control: ControlClient,
) -> tuple[RunStatus, Sequence[LedgerAccount], Sequence[WaitReason]]:
    """Return the state of a run, its books, and what its trainers wait for."""
    status = await control.get_run()
    return status, await control.ledger.accounts(), await _waits(control, status)


async def _waits(control: ControlClient, status: RunStatus) -> list[WaitReason]:
    return [w for p in status.policies for w in await control.ledger.explain_wait(p.policy_id)]


def tables_of(
    status: RunStatus, waits: Sequence[WaitReason], *, rewards: Rewards | None = None
) -> Group:
    """Return the run as people see it: policies, pool, who takes part, what is waited for.

    Args:
        status: Of the run.
        waits: Of its trainers.
        rewards: Means by policy and step, which are drawn as curves.
    """
    lines: list[Table | Text] = [Text(nodes_of(status)), policy_table(status)]
    for policy, curve in (rewards or {}).items():
        if curve:
            lines.append(Text(f"{policy} reward {curve_of(curve)}", style="bold"))
    if any(member.role is MemberRole.RAAS for member in status.members):
        lines.append(pool_table(status))
    lines += failures_of(status.failures)
    lines += [Text(f"{wait.waiter_id} waits: {wait.message}", style="dim") for wait in waits]
    if status.failure is not None:
        lines.append(Text(str(status.failure), style="red"))
    return Group(*lines)


def _books(accounts: Sequence[LedgerAccount]) -> Iterator[Text]:
    """Yield the books of each policy: where every sample is, and why some were dropped."""
    for account in accounts:
        drops = sorted(account.drops, key=lambda drop: -drop.count)
        places = {
            **{name: getattr(account, f"{name}_count") for name in _PLACES},
            "dropped": sum(drop.count for drop in drops),
        }
        line = f"{account.policy_id}: {account.issued_count:,} issued = "
        line += " + ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in places.items())
        if drops:
            line += f" ({', '.join(f'{drop.count:,} {drop.reason}' for drop in drops)})"
        yield Text(line) if account.is_balanced else Text(f"{line}: not so", style="red")


def status_to_json(
    status: RunStatus,
    books: Sequence[LedgerAccount] = (),
    waits: Sequence[WaitReason] | None = None,
) -> str:
    """Return the state of a run for machines, with its books and waits where they are given."""
    fields: dict[str, Any] = asdict(status)
    if books:
        fields["books"] = [asdict(each) | {"balanced": each.is_balanced} for each in books]
    if waits is not None:
        fields["waits"] = [asdict(wait) for wait in waits]
    return json.dumps(fields, default=_plain)


async def live_status(run_dir: RunDir) -> str:
    """Return the state of a live run for machines, with its books and waits.

    Raises:
        AstraflowError: NOT_READY when no hub of this run can be reached.
    """
    async with ControlClient.of(run_dir) as control:
        return status_to_json(*await _read(control))


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


_LINES = 12

WARN_SHARE = 0.2

"""Of the last training rollouts; when more fail the user is warned."""

_WARN_SHARE_FILTERED = 0.25

_MAX_TOLD = 24


class UnbrokenOutput:
    """A stream of text that fails nobody.

    Once its reader, disk or terminal takes nothing, what comes is for nobody.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._unbroken():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._unbroken():
            self._stream.flush()

    @contextmanager
    def _unbroken(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            log.warning("the console takes nothing more; the run goes on", why=str(error))
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


class RunProgress:
    """Shows each status that it is given."""

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self._console = console
        self._recipe = recipe
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._printed_step = -1
        # Whether its traceback was printed, by cause.
        self._told: dict[str, bool] = {}
        self._is_warned = self._is_warned_of_filters = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def note(self, message: str) -> None:
        """Print one line above the table; a command in it can be pasted."""
        self._console.print(message, soft_wrap=True)

    def show(self, status: RunStatus) -> None:
        """Show the state of the run; a failure of a kind that is new, with its traceback."""
        self._print_failures(status.failures)
        self._print_filtered(min(policy.filtered_group_count for policy in status.policies))
        if self._console.is_terminal:
            table = Table.grid(padding=(0, 2))
            for policy in status.policies:
                total = self._recipe.policies[policy.policy_id].trainer.step_count
                table.add_row(
                    Text(policy.policy_id, style="bold"),
                    ProgressBar(total=total, completed=policy.step, width=24),
                    line_of(policy, failures=status.failures),
                )
            nodes = Text(nodes_of(status), style="dim")
            self._live.update(Group(table, nodes), refresh=True)
            return
        step = min(policy.step for policy in status.policies)
        counts = [policy.trainer.step_count or 120 for policy in self._recipe.policies.values()]
        # The first ones sooner: of a long run something is to be read after its first steps.
        apart = min(max(1, max(counts) // _LINES), self._printed_step + 2)
        if step >= self._printed_step + apart:
            self._printed_step = step
            for policy in status.policies:
                line = line_of(policy, failures=status.failures)
                self._console.print(line, soft_wrap=True)

    def _print_failures(self, report: FailureReport) -> None:
        for cause in report.causes:
            has_traceback = bool(cause.last.traceback)
            known = self._told.get(cause.cause)
            is_news = known is None or (has_traceback and not known)
            if is_news and len(self._told) < _MAX_TOLD:
                self._told[cause.cause] = has_traceback
                self._console.print(text_of(cause.last), soft_wrap=True)
        if report.recent_count < LEAST_COUNT:
            return
        share = report.recent_share
        if share > WARN_SHARE and not self._is_warned:
            most = self._recipe.rollouts.max_failed_share
            end = f"above {most:.0%} the run ends" if most < 1 else "the recipe lets it go on"
            self._warn(
                f"{share:.0%} of the last {report.recent_count} training rollouts failed; {end} "
                "(rollouts.max_failed_share)"
            )
        # Shares that waver around the bound are one warning.
        self._is_warned = share > (WARN_SHARE / 2 if self._is_warned else WARN_SHARE)

    def _print_filtered(self, count: int) -> None:
        """Warn once that filters leave nothing of group after group."""
        most = self._recipe.rollouts.max_filtered_groups
        is_many = count > most * _WARN_SHARE_FILTERED
        if is_many and not self._is_warned_of_filters:
            self._warn(
                f"filters left too little of the last {count} groups to train on; at {most} the "
                "run ends (rollouts.max_filtered_groups)"
            )
        self._is_warned_of_filters = is_many

    def _warn(self, what: str) -> None:
        self._console.print(Text(f"warning: {what}", style="yellow"), soft_wrap=True)


def text_of(failure: Failure) -> Text:
    """Return why rollouts fail: what failed, and the traceback down to the user's line."""
    if failure.reason is Reason.POLICY_FAULT:
        return Text(f"the policy broke a rollout, which counts: {failure.message}", style="dim")
    text = Text(f"{failure.reason}: {failure.message}", style="red")
    if failure.traceback:
        text.append("\n" + indent(failure.traceback, "  "), style="default")
    return text


def line_of(policy: PolicyStatus, *, failures: FailureReport) -> str:
    """Return one policy in one line: step, reward, version, staleness, work, waiting, failures."""
    failed = f" failed {failures.recent_share:.0%}" if failures.recent_failed_count else ""
    return (
        f"{policy.policy_id}: step {policy.step} reward {_or_dash(policy.mean_reward, '.3f')} "
        f"version {_or_dash(policy.version)} "
        f"staleness ≤{max(policy.staleness_counts, default=0)} fresh {policy.fresh_count} "
        f"open {policy.open_group_count}/{policy.max_open_group_count} "
        f"waits {policy.wait_fraction:.0%} {policy.tokens_per_s:,.0f} tok/s{failed}"
    )


def nodes_of(status: RunStatus) -> str:
    """Return who takes part, in one line."""
    names = [f"{member.name} {member.state}" for member in status.members]
    return f"{status.state}: {', '.join(names) or 'nobody has joined yet'}"


_BARS = "▁▂▃▄▅▆▇█"

_MAX_BARS = 40


def curve_of(curve: Mapping[int, float]) -> str:
    """Return values by step in one line: means of as many steps as a bar stands for.

    Example:
        >>> curve_of({1: 0.0, 2: 0.5, 3: 1.0})
        '▁▅█ 0.000 → 1.000, steps 1 to 3'
    """
    steps = sorted(curve)
    width = -(-len(steps) // _MAX_BARS)
    parts = (steps[at : at + width] for at in range(0, len(steps), width))
    means = [sum(curve[step] for step in part) / len(part) for part in parts]
    low = min(means)
    span = (max(means) - low) or 1.0
    bars = "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)
    return f"{bars} {means[0]:.3f} → {means[-1]:.3f}, steps {steps[0]:,} to {steps[-1]:,}"


def policy_table(status: RunStatus) -> Table:
    """Return a row per policy: progress, work under way, buffer, staleness, waiting."""
    table = Table("policy", "step", "version", "reward", "open", "buffer", "staleness", "waits")
    for policy in status.policies:
        size = policy.buffer_nbytes
        table.add_row(
            policy.policy_id,
            str(policy.step),
            _or_dash(policy.version),
            _or_dash(policy.mean_reward, ".3f"),
            f"{policy.open_group_count}/{policy.max_open_group_count}",
            f"{policy.buffer_group_count} groups, "
            + (f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"),
            staleness_of(policy.staleness_counts),
            f"{policy.wait_fraction:.0%}",
        )
    return table


def _or_dash(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def staleness_of(counts: Mapping[int, int]) -> str:
    """Return a histogram in one line, from 0 versions on.

    Example:
        >>> staleness_of({0: 8, 2: 4})
        '0 █▁▅ 2'
    """
    if not counts:
        return "-"
    most = max(counts.values())
    heights = (counts.get(age, 0) / most for age in range(max(counts) + 1))
    bars = "".join(_BARS[round(height * (len(_BARS) - 1))] for height in heights)
    return f"0 {bars} {max(counts)}"


def pool_table(status: RunStatus) -> Table:
    """Return a row per region: nodes by state, credit in use, speed, versions behind."""
    regions: defaultdict[str, list[MemberStatus]] = defaultdict(list)
    for member in status.members:
        if member.role is MemberRole.RAAS:
            regions[member.region].append(member)
    table = Table("region", "nodes", "rollouts out", "tokens/s", "behind")
    newest = {policy.policy_id: policy.version for policy in status.policies}
    for region, nodes in sorted(regions.items()):
        out = sum(node.outstanding_count for node in nodes)
        credit = sum(node.max_outstanding for node in nodes)
        speed = sum(n.load.tokens_per_s for n in nodes if isinstance(n.load, RaasLoad))
        behind = max(
            (
                head - node.versions.get(policy, -1)
                for node in nodes
                for policy, head in newest.items()
                if head is not None
            ),
            default=0,
        )
        states = sorted(Counter(node.state for node in nodes).items())
        told = ", ".join(f"{count} {state}" for state, count in states)
        table.add_row(region or "-", told, f"{out}/{credit}", f"{speed:,.0f}", f"≤ {behind}")
    return table


def causes_table(causes: Iterable[tuple[int, str, str, str]], *, title: str | None = None) -> Table:
    """Return why rollouts failed: how many, the reason, the cause and its last message of each."""
    table = Table("seen", "reason", "cause", "last message", title=title, title_justify="left")
    for count, *texts in causes:
        # Texts of others may look like markup.
        table.add_row(f"{count:,} times", *(Text(str(each)) for each in texts))
    return table


def failures_of(report: FailureReport) -> list[Table | Text]:
    """Return how many rollouts failed, why, and the traceback of the most frequent cause."""
    if not report.causes:
        return []
    head = (
        f"{report.failed_count:,} of {report.finished_count:,} training rollouts failed "
        f"({report.failed_share:.0%}), of the last {report.recent_count} {report.recent_share:.0%}"
    )
    causes = [
        (each.count, each.last.reason, each.cause, each.last.message) for each in report.causes
    ]
    table = causes_table(causes)
    found: list[Table | Text] = [Text(head, style="yellow"), table]
    worst = next((each.last.traceback for each in report.causes if each.last.traceback), "")
    return [*found, Text(worst)] if worst else found


Waits = Mapping[PolicyId, Sequence[WaitReason]]


async def show_waits(run_dir: RunDir, *, as_json: bool) -> str:
    """Return what every trainer of a run waits for.

    Raises:
        AstraflowError: NOT_READY when no hub of this run can be reached.
    """
    async with ControlClient.of(run_dir) as control:
        status = await control.get_run()
        waits = {
            policy.policy_id: await control.ledger.explain_wait(policy.policy_id)
            for policy in status.policies
        }
    if not as_json:
        return "\n".join(lines_of(status, waits))
    policies = {policy: [asdict(link) for link in links] for policy, links in waits.items()}
    told = {"run_id": status.run_id, "state": status.state, "policies": policies}
    return json.dumps(told, default=_plain)


def lines_of(status: RunStatus, waits: Waits) -> Iterator[str]:
    """Yield the waits as a tree: a link whose waiter was the subject before stands below it."""
    yield f"{status.run_id} is {status.state}"
    for policy_id, links in waits.items():
        yield f"{policy_id} {'waits' if links else 'waits for nothing'}"
        depths = {str(policy_id): 0}
        for link in links:
            depth = depths.get(link.waiter_id, 0) + 1
            if link.subject_id:
                depths.setdefault(link.subject_id, depth)
            yield f"{'   ' * (depth - 1)}└─ {link.message}{_times(link, status.server_time)}"


def _times(link: WaitReason, now: datetime) -> str:
    """Return since when, and when the run acts by itself."""
    parts: list[str] = []
    if link.since_time is not None:
        parts.append(f"for {max(0.0, (now - link.since_time).total_seconds()):.1f} s")
    if link.resolve_time is not None:
        parts.append(f"given up in {max(0.0, (link.resolve_time - now).total_seconds()):.1f} s")
    return f" ({', '.join(parts)})" if parts else ""
