"""What came of a run, read back from the files that it wrote."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from astraflow.config.run_dir import RunDir, read_json_lines

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
        wall_s: From the launcher's start to its end, warm-up included.
        train_s: From the first task to the last version.
        accuracy_before: Of the first suite on the first versions.
        accuracy_after: Of the same suite on the last versions.
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
    accuracy_before: float | None
    accuracy_after: float | None
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
        parts = {name: _fields(policy) for name, policy in self.policies.items()}
        return {
            **{name: getattr(self, name) for name in self.__slots__ if name != "policies"},
            "steps": sum(policy.steps for policy in self.policies.values()),
            "rollouts": sum(policy.rollouts for policy in self.policies.values()),
            "versions": sum(policy.versions for policy in self.policies.values()),
            "weights_nbytes": {n: policy.weights_nbytes for n, policy in self.policies.items()},
            "policies": parts,
        }


def _fields(policy: PolicySummary) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in policy.__slots__}


def summarise(
    run_dir: RunDir, *, name: str, seed: int, state: str, wall_s: float, failure: str | None = None
) -> RunSummary:
    """Read a run's files and write its summary beside them."""
    steps: dict[str, list[Row]] = defaultdict(list)
    for row in read_json_lines(run_dir.metrics):
        _keep(steps[row["policy"]], row)
    live: dict[str, list[Row]] = defaultdict(list)
    for row in read_json_lines(run_dir.versions):
        if row.get("state", "live") == "live":
            live[row["policy"]].append(row)
    evals = read_json_lines(run_dir.evals)
    before, after = _accuracies(evals)
    status: dict[str, Any] = {}
    if run_dir.status.exists():
        status = json.loads(run_dir.status.read_text())
    train_s = float(status.get("train_s", 0.0))
    tokens = sum(row.get("batch/sampled_tokens", 0) for rows in steps.values() for row in rows)
    summary = RunSummary(
        name=name,
        seed=seed,
        state=state,
        wall_s=round(wall_s, 3),
        train_s=round(train_s, 3),
        accuracy_before=before,
        accuracy_after=after,
        tokens_per_s=round(tokens / train_s, 1) if train_s else 0.0,
        policies={p: _policy(steps[p], live[p]) for p in sorted(steps.keys() | live.keys())},
        evals=evals,
        failure=failure,
        failures=status.get("failures", {}),
    )
    run_dir.summary.write_text(json.dumps(summary.to_json(), indent=2) + "\n")
    return summary


def _keep(steps: list[Row], row: Row) -> None:
    """Append a step; one that comes again takes the place of what was lost with its trainer."""
    while steps and steps[-1]["step"] >= row["step"]:
        steps.pop()
    steps.append(row)


def _policy(steps: Sequence[Row], live: Sequence[Row]) -> PolicySummary:
    rewards = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
    tenth = max(1, len(rewards) // 10)
    return PolicySummary(
        steps=len(steps),
        versions=1 + max((row["version"] for row in live), default=-1),
        rollouts=int(sum(map(_rollouts, steps))),
        reward_first=_mean(rewards[:tenth]),
        reward_last=_mean(rewards[-tenth:]),
        staleness_max=max((row.get("lag/max", 0.0) for row in steps), default=0.0),
        wait_fraction=_mean([row.get("time/wait_batch_frac", 0.0) for row in steps]) or 0.0,
        weights_nbytes=sum(row["pulled_nbytes"] for row in live),
        patch_share=_mean([float(row.get("base_version") is not None) for row in live]) or 0.0,
        pause_ms=round(1e3 * median([row.get("pause_s") or 0.0 for row in live] or [0.0]), 3),
    )


def _rollouts(step: Row) -> float:
    """Return how many rollouts a step was the first to train on."""
    return step.get("batch/rollouts", 0) - step.get("data/replay/rollouts", 0)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _accuracies(evals: Sequence[Row]) -> tuple[float | None, float | None]:
    """Return avg@k of the first suite on its oldest and on its newest versions."""
    done = [row for row in evals if row["state"] == "succeeded"]
    if not done:
        return None, None
    suite = [row for row in done if row["suite"] == done[0]["suite"]]
    suite.sort(key=lambda row: sorted(row["versions"].items()))
    return suite[0]["overall"]["avg_at_k"], suite[-1]["overall"]["avg_at_k"]
