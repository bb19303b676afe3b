"""Live progress of a run: a table on a terminal, a line now and then in a log."""

from textwrap import indent
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from astraflow.config.recipe import Recipe
from astraflow.core.errors import Reason
from astraflow.core.failures import LEAST_COUNT
from astraflow.core.status import FailureCause, FailureReport, PolicyStatus, RunStatus

_LINES = 12
WARN_SHARE = 0.2
"""Of the last training rollouts; when more fail the user is warned."""
_MAX_TOLD = 24


class Progress:
    """Shows each status that it is given."""

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self._console = console
        self._recipe = recipe
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._printed_step = -1
        # Whether its traceback was printed, by cause.
        self._told: dict[str, bool] = {}
        self._is_warned = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def note(self, message: str) -> None:
        """Print one line above the table."""
        self._console.print(message)

    def show(self, status: RunStatus) -> None:
        """Show the state of the run; a failure of a kind that is new, with its traceback."""
        self._tell(status.failures)
        if self._console.is_terminal:
            self._live.update(self._table(status), refresh=True)
            return
        step = min(policy.step for policy in status.policies)
        if step >= self._printed_step + self._stride():
            self._printed_step = step
            for policy in status.policies:
                line = line_of(policy, failures=status.failures)
                self._console.print(line, soft_wrap=True)

    def _tell(self, report: FailureReport) -> None:
        for cause in report.causes:
            has_traceback = bool(cause.last.traceback)
            known = self._told.get(cause.cause)
            is_news = known is None or (has_traceback and not known)
            if is_news and len(self._told) < _MAX_TOLD:
                self._told[cause.cause] = has_traceback
                self._console.print(text_of(cause), soft_wrap=True)
        if report.recent_count < LEAST_COUNT:
            return
        share = report.recent_share
        if share > WARN_SHARE and not self._is_warned:
            self._console.print(self._warning(report), soft_wrap=True)
        # Shares that waver around the bound are one warning.
        self._is_warned = share > (WARN_SHARE / 2 if self._is_warned else WARN_SHARE)

    def _warning(self, report: FailureReport) -> Text:
        most = self._recipe.rollouts.max_failed_share
        end = f"above {most:.0%} the run ends" if most < 1 else "the recipe lets it go on"
        count = f"{report.recent_share:.0%} of the last {report.recent_count} training rollouts"
        return Text(f"warning: {count} failed; {end} (rollouts.max_failed_share)", style="yellow")

    def _stride(self) -> int:
        counts = [policy.trainer.step_count or 120 for policy in self._recipe.policies.values()]
        return max(1, max(counts) // _LINES)

    def _table(self, status: RunStatus) -> Group:
        table = Table.grid(padding=(0, 2))
        for policy in status.policies:
            total = self._recipe.policies[policy.policy_id].trainer.step_count
            table.add_row(
                Text(policy.policy_id, style="bold"),
                ProgressBar(total=total, completed=policy.step, width=24),
                line_of(policy, failures=status.failures),
            )
        return Group(table, Text(nodes_of(status), style="dim"))


def text_of(cause: FailureCause) -> Text:
    """Return why rollouts fail: what failed, and the traceback down to the user's line."""
    last = cause.last
    if last.reason is Reason.POLICY_FAULT:
        return Text(f"the policy broke a rollout, which counts: {last.message}", style="dim")
    text = Text(f"{last.reason}: {last.message}", style="red")
    if last.traceback:
        text.append("\n" + indent(last.traceback, "  "), style="default")
    return text


def line_of(policy: PolicyStatus, *, failures: FailureReport) -> str:
    """Return one policy in one line: step, reward, version, staleness, work, waiting, failures."""
    failed = f" failed {failures.recent_share:.0%}" if failures.recent_failed_count else ""
    reward = "-" if policy.mean_reward is None else f"{policy.mean_reward:.3f}"
    staleness = max(policy.staleness_counts, default=0)
    version = "-" if policy.version is None else policy.version
    return (
        f"{policy.policy_id}: step {policy.step} reward {reward} version {version} "
        f"staleness ≤{staleness} fresh {policy.fresh_count} "
        f"open {policy.open_group_count}/{policy.max_open_group_count} "
        f"waits {policy.wait_fraction:.0%} {policy.tokens_per_s:,.0f} tok/s{failed}"
    )


def nodes_of(status: RunStatus) -> str:
    """Return who takes part, in one line."""
    names = [f"{member.name} {member.state}" for member in status.members]
    return f"{status.state}: {', '.join(names) or 'nobody has joined yet'}"
