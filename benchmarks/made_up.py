"""What members make up that have neither weights nor an engine: sound, and without a meaning."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from astraflow.core.ids import PolicyId, PromptId, TrajectoryId
from astraflow.core.rollouts import FinishReason, Outcome, Rollout, Trajectory, VersionSpan
from astraflow.core.tasks import Prompt, RolloutTask, TaskPurpose
from astraflow.core.versions import CodecProfile, PatchInfo, VersionInfo


def made_up_patch(version: int, *, base_version: int | None = None) -> PatchInfo:
    """Return a patch of one chunk that leads to a version; base_version None: from nothing."""
    return PatchInfo(
        base_version=base_version,
        version=version,
        profile=CodecProfile.FAST,
        codec_version=1,
        root_digest=version.to_bytes(32, "little"),
        chunk_count=1,
        payload_nbytes=8,
    )


def made_up_version(
    policy_id: PolicyId,
    version: int,
    *,
    step: int = 0,
    content: bytes = b"",
    base_version: int | None = None,
    restored_from: int | None = None,
) -> VersionInfo:
    """Return a version to publish."""
    return VersionInfo(
        policy_id=policy_id,
        version=version,
        layout_digest=bytes(32),
        content_digest=content or version.to_bytes(16, "little"),
        step=step,
        restored_from=restored_from,
        patches=(made_up_patch(version, base_version=base_version),),
    )


def made_up_task(prompt_fields: Mapping[str, Any] | None = None, **changes: Any) -> RolloutTask:
    """Return a task of one sample to train on; `changes` are the fields that matter."""
    fields: dict[str, Any] = {
        "task_id": "t",
        "group_id": "g",
        "purpose": TaskPurpose.TRAIN,
        "workflow_id": "w",
        "prompt": Prompt(prompt_id=PromptId("p"), data_set="train", fields=prompt_fields or {}),
        "sample_indexes": (0,),
        "versions": {},
        "sampling": {},
    }
    return RolloutTask(**(fields | changes))


def made_up_trajectory(
    name: str,
    policy_id: PolicyId,
    spans: Sequence[VersionSpan],
    *,
    prompt_count: int = 1,
    reward: float | None = None,
) -> Trajectory:
    """Return a trajectory."""
    is_sampled = np.arange(prompt_count + sum(span.length for span in spans)) >= prompt_count
    return Trajectory(
        trajectory_id=TrajectoryId(name),
        policy_id=policy_id,
        tokens=np.arange(len(is_sampled), dtype=np.int32),
        sampled_mask=is_sampled,
        logprobs=np.where(is_sampled, -0.5, 0).astype(np.float32),
        version_spans=tuple(spans),
        finish_reason=FinishReason.STOP,
        reward=reward,
    )


def made_up_rollout(*trajectories: Trajectory, **changes: Any) -> Rollout:
    """Return a rollout with a reward; `changes` are the fields that matter."""
    fields: dict[str, Any] = {
        "rollout_id": "r",
        "task_id": "t",
        "group_id": "g",
        "sample_index": 0,
        "outcome": Outcome.SCORED,
        "reward": 1.0,
    }
    return Rollout(**(fields | changes), trajectories=trajectories)
