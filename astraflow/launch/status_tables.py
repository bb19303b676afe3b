"""The state of a run as tables: policies, their buffers, the pool by region."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from astraflow.core.members import MemberRole, MemberStatus, RaasLoad
from astraflow.core.status import FailureReport, PolicyStatus, RunStatus

_BARS = "▁▂▃▄▅▆▇█"


def policy_table(status: RunStatus) -> Table:
    """Return a row per policy: progress, work under way, buffer, staleness, waiting."""
    table = Table("policy", "step", "version", "reward", "open", "buffer", "staleness", "waits")
    for policy in status.policies:
        table.add_row(*_policy_row(policy))
    return table


def _policy_row(policy: PolicyStatus) -> Iterator[str]:
    yield policy.policy_id
    yield str(policy.step)
    yield "-" if policy.version is None else str(policy.version)
    yield "-" if policy.mean_reward is None else f"{policy.mean_reward:.3f}"
    yield f"{policy.open_group_count}/{policy.max_open_group_count}"
    yield f"{policy.buffer_group_count} groups, {_size(policy.buffer_nbytes)}"
    yield staleness_of(policy.staleness_counts)
    yield f"{policy.wait_fraction:.0%}"


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
        table.add_row(
            region or "-", _states(nodes), f"{out}/{credit}", f"{speed:,.0f}", f"≤ {behind}"
        )
    return table


def failures_of(report: FailureReport) -> list[Table | Text]:
    """Return how many rollouts failed, why, and the traceback of the most frequent cause."""
    if not report.causes:
        return []
    head = (
        f"{report.failed_count:,} of {report.finished_count:,} training rollouts failed "
        f"({report.failed_share:.0%}), of the last {report.recent_count} {report.recent_share:.0%}"
    )
    table = Table("seen", "reason", "cause", "last message")
    for cause in report.causes:
        # Texts of others may look like markup.
        cells = (str(cause.last.reason), cause.cause, cause.last.message)
        table.add_row(f"{cause.count:,} times", *map(Text, cells))
    found: list[Table | Text] = [Text(head, style="yellow"), table]
    worst = next((each.last.traceback for each in report.causes if each.last.traceback), "")
    return [*found, Text(worst)] if worst else found


def _states(nodes: list[MemberStatus]) -> str:
    counts: defaultdict[str, int] = defaultdict(int)
    for node in nodes:
        counts[node.state] += 1
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 100_000 else f"{nbytes / 1e3:.1f} kB"
