"""The table that a run ends with."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from astraflow.config.run_dir import RunDir
from astraflow.launch.summary import PolicySummary, RunSummary


def show_summary(console: Console, summary: RunSummary, run_dir: RunDir) -> None:
    """Print what came of a run: accuracy, policies, where each process waited, what lies where."""
    console.print()
    if summary.accuracy_before is not None and summary.accuracy_after is not None:
        rise = summary.accuracy_after - summary.accuracy_before
        console.print(
            f"[bold]{summary.name}[/]: held-out accuracy [bold]{summary.accuracy_before:.3f}[/] → "
            f"[bold green]{summary.accuracy_after:.3f}[/] ({rise:+.3f}), "
            f"{summary.wall_s:.0f} s in all, {summary.train_s:.0f} s of training, "
            f"{summary.tokens_per_s:,.0f} tokens/s"
        )
    console.print(_policies(summary))
    if summary.failures.get("causes"):
        console.print(_failures(summary))
    members = _members(summary, run_dir)
    if members.row_count:
        console.print(members)
    console.print(f"Everything is in [bold]{run_dir.root}[/]: {', '.join(_files(run_dir))}")


def _policies(summary: RunSummary) -> Table:
    table = Table(title="Policies", title_justify="left")
    table.add_column("")
    for name in summary.policies:
        table.add_column(name, justify="right")
    for label, cells in _POLICY_ROWS.items():
        table.add_row(label, *(cells(policy) for policy in summary.policies.values()))
    return table


_POLICY_ROWS: Mapping[str, Callable[[PolicySummary], str]] = {
    "steps": lambda policy: f"{policy.steps:,}",
    "rollouts trained on": lambda policy: f"{policy.rollouts:,}",
    "reward, first and last steps": lambda policy: (
        f"{policy.reward_first or 0:.2f} → {policy.reward_last or 0:.2f}"
    ),
    "staleness": lambda policy: f"≤ {policy.staleness_max:.0f}",
    "versions": lambda policy: f"{policy.versions:,}",
    "weights moved": lambda policy: f"{policy.weights_nbytes / 1e6:.1f} MB",
    "versions as patches": lambda policy: f"{policy.patch_share:.0%}",
    "pause for a swap, median": lambda policy: f"{policy.pause_ms:.1f} ms",
    "trainer waited": lambda policy: f"{policy.wait_fraction:.0%}",
}


def _failures(summary: RunSummary) -> Table:
    failed, finished = summary.failures["failed_count"], summary.failures["finished_count"]
    title = f"Failed rollouts: {failed:,} of {finished:,} ({summary.failures['failed_share']:.1%})"
    table = Table("seen", "reason", "cause", "last message", title=title, title_justify="left")
    for cause in summary.failures["causes"]:
        # Texts of others may look like markup.
        cells = (cause["reason"], cause["cause"], cause["message"])
        table.add_row(f"{cause['count']:,} times", *map(Text, cells))
    return table


def _members(summary: RunSummary, run_dir: RunDir) -> Table:
    status: dict[str, Any] = {}
    if run_dir.status.exists():
        status = json.loads(run_dir.status.read_text())
    table = Table(title="Where each process waited", title_justify="left")
    for column in ("process", "role", "did", "waited"):
        table.add_column(column, justify="left" if column in ("process", "role") else "right")
    for member in status.get("members", []):
        load: dict[str, Any] = member.get("load") or {}
        did = f"{member['accepted_count']:,} rollouts"
        policy = summary.policies.get(member["name"].removeprefix("trainer-"))
        if member["role"] == "trainer" and policy is not None:
            did = f"{policy.steps} steps"
        table.add_row(member["name"], member["role"], did, f"{load.get('wait_fraction', 0.0):.0%}")
    if "hub" in status:
        hub = status["hub"]
        did = f"{hub['event_count']:,} events"
        table.add_row("hub", "dataflow", did, f"{hub['idle_fraction']:.0%}")
    return table


def _files(run_dir: RunDir) -> list[str]:
    names = ("summary.json", "metrics.jsonl", "rollouts", "checkpoints", "reward.png", "logs")
    return [name for name in names if (run_dir.root / name).exists()]
