"""What members make up that have neither weights nor an engine: sound, and without a meaning."""

from collections.abc import Sequence

import numpy as np

from astraflow.core.ids import PolicyId, TrajectoryId
from astraflow.core.rollouts import FinishReason, Trajectory, VersionSpan
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
