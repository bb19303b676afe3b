"""Live progress of a run: a table on a terminal, a line now and then in a log."""

from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from astraflow.config.recipe import Recipe
from astraflow.core.status import PolicyStatus, RunStatus

_LINES = 12


class Progress:
    """Shows each status that it is given."""

    def __init__(self, console: Console, recipe: Recipe) -> None:
        self._console = console
        self._recipe = recipe
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._printed_step = -1

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
        """Show the state of the run."""
        if self._console.is_terminal:
            self._live.update(self._table(status), refresh=True)
            return
        step = min(policy.step for policy in status.policies)
        if step >= self._printed_step + self._stride():
            self._printed_step = step
            for policy in status.policies:
                self._console.print(line_of(policy), soft_wrap=True)

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
                line_of(policy),
            )
        return Group(table, Text(nodes_of(status), style="dim"))


def line_of(policy: PolicyStatus) -> str:
    """Return one policy in one line: step, reward, version, staleness, work, waiting."""
    reward = "-" if policy.mean_reward is None else f"{policy.mean_reward:.3f}"
    staleness = max(policy.staleness_counts, default=0)
    version = "-" if policy.version is None else policy.version
    return (
        f"{policy.policy_id}: step {policy.step} reward {reward} version {version} "
        f"staleness ≤{staleness} fresh {policy.fresh_count} "
        f"open {policy.open_group_count}/{policy.max_open_group_count} "
        f"waits {policy.wait_fraction:.0%} {policy.tokens_per_s:,.0f} tok/s"
    )


def nodes_of(status: RunStatus) -> str:
    """Return who takes part, in one line."""
    names = [f"{member.name} {member.state}" for member in status.members]
    return f"{status.state}: {', '.join(names) or 'nobody has joined yet'}"
