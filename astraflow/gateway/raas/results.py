"""Orders that have ended, as items of /pull: pure functions."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import NOT_SAMPLED, Rollout, Trajectory
from astraflow.gateway.raas.orders import Order

Labels = Mapping[PolicyId, Mapping[int, int]]

_PASSED_ON = ("query_id", "source")


def item_of(order: Order, labels: Labels, policy_ids: Sequence[PolicyId]) -> dict[str, Any]:
    """Return {task_id, result}; the result of one that failed is {ok: False, error}.

    Args:
        order: That has ended.
        labels: The trainers' own numbers of versions, by policy.
        policy_ids: Of the recipe, in its order.
    """
    if not order.rollouts:
        why = f"{order.failure.reason}: {order.failure.message}"
        return {"task_id": order.number, "result": {"ok": False, "error": why}}
    rollouts = [rollout for _, rollout in sorted(order.rollouts.items())]
    fields = order.task.prompt.fields
    result: dict[str, Any] = {
        "prompt_id": order.task.prompt.prompt_id,
        "n_trajs": len(rollouts),
        "rewards": np.array([each.reward for each in rollouts], np.float32),
        "trajectories": [_trajectory(each, labels, policy_ids) for each in rollouts],
        "agent_metrics": _means(rollouts),
    }
    result |= {name: fields[name] for name in _PASSED_ON if name in fields}
    return {"task_id": order.number, "result": result}


def _trajectory(rollout: Rollout, labels: Labels, policy_ids: Sequence[PolicyId]) -> dict[str, Any]:
    sequences = [_sequence(each, labels, policy_ids) for each in rollout.trajectories]
    return {"sequences": sequences, "stats": dict(rollout.metrics)}


def _sequence(
    trajectory: Trajectory, labels: Labels, policy_ids: Sequence[PolicyId]
) -> dict[str, Any]:
    """Return tensors [1, L]; versions are the trainer's own, -1 where nothing was sampled."""
    sampled = trajectory.sampled_mask
    fields: dict[str, Any] = {
        "input_ids": trajectory.tokens.astype(np.int32),
        "loss_mask": sampled.astype(np.int32),
        "logprobs": trajectory.logprobs.astype(np.float32),
        "versions": _labelled(trajectory.versions, labels[trajectory.policy_id]),
        "attention_mask": np.ones(len(sampled), np.bool_),
    }
    if len(policy_ids) > 1:
        number = model_index(trajectory.policy_id, policy_ids)
        fields["model_ids"] = np.where(sampled, number, -1).astype(np.int32)
    rows = {name: values[None, :] for name, values in fields.items()}
    if trajectory.reward is not None:
        rows["rewards"] = np.array([trajectory.reward], np.float32)
    return rows


def model_index(policy_id: PolicyId, policy_ids: Sequence[PolicyId]) -> int:
    """Return the number in `model<digits>`, which existing services go by, or else its place."""
    named = re.fullmatch(r"model(\d+)", policy_id)
    return int(named[1]) if named else list(policy_ids).index(policy_id)


def _labelled(versions: np.ndarray, labels: Mapping[int, int]) -> np.ndarray:
    found = np.full(len(versions), NOT_SAMPLED, np.int32)
    for version in np.unique(versions):
        if version != NOT_SAMPLED:
            found[versions == version] = labels[int(version)]
    return found


def _means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of every metric over the rollouts that have it."""
    names = dict.fromkeys(name for each in rollouts for name in each.metrics)
    return {
        name: float(np.mean([each.metrics[name] for each in rollouts if name in each.metrics]))
        for name in names
    }
