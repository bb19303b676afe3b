"""Losses: what each pass adds to the gradient of a batch, and what the log says of it."""

from astraflow.trainers.losses.clip_range import ClipRange, clip_range_of
from astraflow.trainers.losses.inputs import LossInputs
from astraflow.trainers.losses.metrics import loss_metrics
from astraflow.trainers.losses.policy_loss import policy_loss
from astraflow.trainers.losses.shares import divisor_of, prepared
from astraflow.trainers.losses.surrogates import Terms, surrogate_of

__all__ = [
    "ClipRange",
    "LossInputs",
    "Terms",
    "clip_range_of",
    "divisor_of",
    "loss_metrics",
    "policy_loss",
    "prepared",
    "surrogate_of",
]
