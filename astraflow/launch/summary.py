"""What came of a run: read back from the files that it wrote, as JSON, as a table, as a picture."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astraflow.config.run_dir import RunDir, read_json, read_json_lines
from astraflow.launch.status import causes_table

Row = Mapping[str, Any]

STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """One policy's part.

    Attributes:
        steps: Optimizer steps that count: not those that were lost with a trainer.
        versions: Published.
        rollouts: Rollouts trained on.
        reward_first: Mean reward of the first tenth of the steps.
        reward_last: Of the last tenth.
        pairs_first: Share of pairs told apart in that first tenth; None: none were compared.
        pairs_last: In the last tenth.
        staleness_max: In versions, over all batches.
        wait_fraction: Share of the time that the trainer waited for a batch.
        weights_nbytes: Payload pulled by all RaaS.
        patch_share: Of the versions that went live, those that came as patches of older ones.
        pause_ms: Median pause of an engine for a swap.
    """

    steps: int
    versions: int
    rollouts: int
    reward_first: float | None
    reward_last: float | None
    pairs_first: float | None
    pairs_last: float | None
    staleness_max: float
    wait_fraction: float
    weights_nbytes: int
    patch_share: float
    pause_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The whole run; `to_json` is `summary.json`.

    Attributes:
        name: Of the recipe.
        seed: Of the recipe.
        state: done, failed, or stopped by the user.
        wall_s: From the launcher's start to its end, warm-up included; of a run that went on, of
            all its parts.
        train_s: All steps with the waits before them, of the policy that took longest.
        suite: First suite that was measured; empty: none was.
        accuracy_before: Of it on the first versions that were measured.
        accuracy_after: On the last ones. Of one alone it is the other one that is set, if it is of
            version 0, else this.
        held_out_before: Mean reward there.
        held_out_after: As `accuracy_after`.
        tokens_per_s: Sampled tokens trained on, per second of train_s.
        policies: By id.
        evals: Every finished evaluation.
        failure: Why it failed, if it did.
        failures: Of rollouts: how many, and by which cause; see `status.json`.
    """

    name: str
    seed: int
    state: str
    wall_s: float
    train_s: float
    suite: str
    accuracy_before: float | None
    accuracy_after: float | None
    held_out_before: float | None
    held_out_after: float | None
    tokens_per_s: float
    policies: Mapping[str, PolicySummary]
    evals: Sequence[Row] = field(default_factory=list[Row])
    failure: str | None = None
    failures: Row = field(default_factory=dict[str, Any])

    @property
    def was_stopped(self) -> bool:
        """Whether the user ended it."""
        return self.state == STOPPED

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON: totals on top, policies below."""
        return {
            **{name: getattr(self, name) for name in self.__slots__ if name != "policies"},
            "steps": sum(policy.steps for policy in self.policies.values()),
            "rollouts": sum(policy.rollouts for policy in self.policies.values()),
            "versions": sum(policy.versions for policy in self.policies.values()),
            "weights_nbytes": {n: policy.weights_nbytes for n, policy in self.policies.items()},
            "policies": {name: asdict(policy) for name, policy in self.policies.items()},
        }


def summarise(
    run_dir: RunDir, *, name: str, seed: int, state: str, wall_s: float, failure: str | None = None
) -> RunSummary:
    """Return what a run's files come to."""
    steps = _steps(run_dir)
    live: dict[str, list[Row]] = defaultdict(list)
    for row in read_json_lines(run_dir.versions):
        if row.get("state", "live") == "live":
            live[row["policy"]].append(row)
    evals = read_json_lines(run_dir.evals)
    measured = _measured(evals)
    # One alone says how a run began only where it is of the first weights.
    begun = measured[:1] if measured[1:] or _is_of_first_weights(measured) else []
    first: Row = begun[0]["overall"] if begun else {}
    last: Row = measured[-1]["overall"] if len(measured) > len(begun) else {}
    # The waits for batches, too.
    took = (
        sum(row.get("time/wait_s", 0.0) + row.get("time/train_s", 0.0) for row in rows)
        for rows in steps.values()
    )
    train_s = max(took, default=0.0)
    tokens = sum(row.get("batch/sampled_tokens", 0) for rows in steps.values() for row in rows)
    return RunSummary(
        name=name,
        seed=seed,
        state=state,
        wall_s=round(wall_s, 3),
        train_s=round(train_s, 3),
        suite=measured[0]["suite"] if measured else "",
        accuracy_before=first.get("avg_at_k"),
        accuracy_after=last.get("avg_at_k"),
        held_out_before=first.get("mean_reward"),
        held_out_after=last.get("mean_reward"),
        tokens_per_s=round(tokens / train_s, 1) if train_s else 0.0,
        policies={
            policy: _policy(steps.get(policy, ()), live.get(policy, ()))
            for policy in sorted(steps.keys() | live.keys())
        },
        evals=evals,
        failure=failure,
        failures=read_json(run_dir.status).get("failures", {}),
    )


def _steps(run_dir: RunDir) -> dict[str, list[Row]]:
    """Return the steps that count, by policy."""
    steps: dict[str, list[Row]] = defaultdict(list)
    for row in read_json_lines(run_dir.metrics):
        keep_step(steps[row["policy"]], row)
    return steps


def keep_step(steps: list[Row], row: Row) -> None:
    """Append a step; one that comes again takes the place of what was lost with its trainer."""
    while steps and steps[-1]["step"] >= row["step"]:
        steps.pop()
    steps.append(row)


def _policy(steps: Sequence[Row], live: Sequence[Row]) -> PolicySummary:
    reward, pairs = _ends(steps, "reward/mean"), _ends(steps, "pairs/accuracy")
    return PolicySummary(
        steps=len(steps),
        versions=1 + max((row["version"] for row in live), default=-1),
        # Those that a step was the first to train on.
        rollouts=int(
            sum(row.get("batch/rollouts", 0) - row.get("data/replay/rollouts", 0) for row in steps)
        ),
        reward_first=reward[0],
        reward_last=reward[1],
        pairs_first=pairs[0],
        pairs_last=pairs[1],
        staleness_max=max((row.get("lag/max", 0.0) for row in steps), default=0.0),
        wait_fraction=_mean([row.get("time/wait_batch_frac", 0.0) for row in steps]) or 0.0,
        weights_nbytes=sum(row["pulled_nbytes"] for row in live),
        patch_share=_mean([float(row.get("base_version") is not None) for row in live]) or 0.0,
        pause_ms=round(1e3 * median([row.get("pause_s") or 0.0 for row in live] or [0.0]), 3),
    )


def _ends(steps: Sequence[Row], key: str) -> tuple[float | None, float | None]:
    """Return the means of a number over the first and the last tenth of the steps that have it."""
    values = [row[key] for row in steps if row.get(key) is not None]
    tenth = max(1, len(values) // 10)
    return _mean(values[:tenth]), _mean(values[-tenth:])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _measured(evals: Sequence[Row]) -> list[Row]:
    """Return what the first suite came to, by versions: the last measurement of each."""
    done = [row for row in evals if row["state"] == "succeeded"]
    by_versions = {
        tuple(sorted(row["versions"].items())): row
        for row in done
        if row["suite"] == done[0]["suite"]
    }
    return [by_versions[versions] for versions in sorted(by_versions)]


def show_summary(console: Console, summary: RunSummary, run_dir: RunDir) -> None:
    """Print what came of a run: rewards, policies, where each process waited, what lies where."""
    console.print()
    console.print(f"[bold]{escape(summary.name)}[/]: {', '.join(_headline(summary))}")
    if summary.policies:
        console.print(_policies(summary))
    if causes := summary.failures.get("causes"):
        failed, finished = summary.failures["failed_count"], summary.failures["finished_count"]
        share = summary.failures["failed_share"]
        title = f"Failed rollouts: {failed:,} of {finished:,} ({share:.1%})"
        rows = [(each["count"], each["reason"], each["cause"], each["message"]) for each in causes]
        console.print(causes_table(rows, title=title))
    members = _members(summary, run_dir)
    if members.row_count:
        console.print(members)
    root = escape(str(run_dir.root))
    console.print(f"Everything is in [bold]{root}[/]: {', '.join(_files(run_dir))}")


def _headline(summary: RunSummary) -> Iterator[str]:
    """Say what was measured, and nothing else."""
    accuracy = summary.accuracy_before, summary.accuracy_after
    reward = summary.held_out_before, summary.held_out_after
    # Where no rollout was ever right, what counts as right says nothing of this reward.
    has_accuracy = any(accuracy)
    if has_accuracy:
        yield f"{escape(summary.suite).replace('_', '-')} accuracy {_change(*accuracy)}"
    if reward != (None, None) and (not has_accuracy or reward != accuracy):
        yield f"{escape(summary.suite).replace('_', '-')} reward {_change(*reward)}"
    for name, policy in summary.policies.items():
        of_whom = f" of {escape(name)}" if len(summary.policies) > 1 else ""
        if policy.pairs_first is not None:
            yield f"pairs told apart{of_whom} {_change(policy.pairs_first, policy.pairs_last)}"
        # Stored answers are worth the same in every step.
        is_stored = policy.pairs_first is not None and policy.reward_first == policy.reward_last
        if policy.reward_first is not None and not is_stored:
            yield f"reward{of_whom} {_change(policy.reward_first, policy.reward_last)} in training"
    yield f"{summary.wall_s:.0f} s in all"
    yield f"{summary.train_s:.0f} s of training"
    yield f"{summary.tokens_per_s:,.0f} tokens/s"


def _is_of_first_weights(measured: Sequence[Row]) -> bool:
    return bool(measured) and not any(measured[0].get("versions", {}).values())


def _change(before: float | None, after: float | None) -> str:
    if before is None and after is not None:
        return f"[bold green]{after:.3f}[/] at the end, not measured before"
    if after is None:
        return f"[bold]{before or 0:.3f}[/] at the start, not measured later"
    rise = after - (before or 0)
    return f"[bold]{before or 0:.3f}[/] → [bold green]{after:.3f}[/] ({rise:+.3f})"


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
        "-"
        if policy.reward_first is None
        else f"{policy.reward_first:.3g} → {policy.reward_last or 0:.3g}"
    ),
    "staleness": lambda policy: f"≤ {policy.staleness_max:.0f}",
    "versions": lambda policy: f"{policy.versions:,}",
    "weights moved": lambda policy: f"{policy.weights_nbytes / 1e6:.1f} MB",
    "versions as patches": lambda policy: f"{policy.patch_share:.0%}",
    "pause for a swap, median": lambda policy: f"{policy.pause_ms:.1f} ms",
    "trainer waited": lambda policy: f"{policy.wait_fraction:.0%}",
}


def _members(summary: RunSummary, run_dir: RunDir) -> Table:
    status = read_json(run_dir.status)
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


_WINDOW = 10


def draw_reward(run_dir: RunDir) -> Path | None:
    """Draw `reward.png`; None without matplotlib (extra `plot`) or without steps."""
    curves = {
        policy: [
            (row["step"], row["reward/mean"]) for row in rows if row.get("reward/mean") is not None
        ]
        for policy, rows in _steps(run_dir).items()
    }
    if not any(curves.values()):
        return None
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    plt: Any = pyplot
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    for policy, curve in sorted(curves.items()):
        steps, rewards = [step for step, _ in curve], [reward for _, reward in curve]
        last = [rewards[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(rewards))]
        smooth = [sum(each) / len(each) for each in last]
        (line,) = axes.plot(steps, smooth, label=f"{policy}, mean of {_WINDOW} steps")
        axes.plot(steps, rewards, color=line.get_color(), alpha=0.25, linewidth=0.8)
    # What was measured on held-out data, at the version of the suite's first policy.
    evals = [row for row in read_json_lines(run_dir.evals) if row["state"] == "succeeded"]
    has_accuracy = any(row["overall"]["avg_at_k"] for row in evals)
    key = "avg_at_k" if has_accuracy else "mean_reward"
    marks = [(min(row["versions"].values()), row["overall"][key]) for row in evals]
    if marks:
        label = f"held-out {'accuracy' if has_accuracy else 'reward'}"
        axes.scatter(*zip(*marks, strict=True), marker="D", s=36, color="black", zorder=3)
        axes.scatter([], [], marker="D", s=36, color="black", label=label)
    axes.set(xlabel="optimizer step", ylabel="mean reward")
    if all(0 <= reward <= 1 for curve in curves.values() for _, reward in curve):
        axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25)
    axes.legend(loc="best", frameon=False)
    figure.tight_layout()
    figure.savefig(run_dir.plot)
    plt.close(figure)
    return run_dir.plot
