"""Rollouts: what one run of a workflow yields, checked where it is made.

A rollout is accepted or refused whole. Its trajectories hold tokens as numpy arrays; every sampled
token has the version that sampled it, and may have the experts that it went through.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.frozen import fast_init
from astraflow.core.ids import GroupId, PolicyId, RolloutId, TaskId, TrajectoryId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype

UNROUTED: Final = 0xFFFF

"""No expert: the token went through no model, as the last one that was sampled."""

ROUTED_EXPERTS: Final = "routed_experts"

"""Name of the column, u16[T, layers, k]; see `rollout/v1/column.proto`."""

TURN_REWARDS: Final = "token_rewards"

"""Name of the column, f32[T]; a turn is rewarded at its last token."""

LOSS_WEIGHTS: Final = "loss_weights"

"""Name of the column, f32[T], of a workflow: factors of the tokens' losses."""

LARGEST: Final = 1e38

"""Of rewards, and what a loss is made of: trainers have them, and their differences, as f32."""

_AXES: Final = 3

_NO_ROUTES: Final = f"column {ROUTED_EXPERTS} is not u16[tokens, layers, k]"


def filled_routes(lengths: Sequence[int], found: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Lay the routes of some rows end to end; those that do not tell theirs are UNROUTED.

    Args:
        lengths: Tokens of each row.
        found: u16[n, layers, k] of each; None where it is not told. One that is of another model
            than the first counts as not told.

    Returns:
        u16[T, layers, k]; None when no row tells.

    Example:
        >>> filled_routes([1, 2], [None, np.array([[[3]], [[4]]], "u2")]).ravel().tolist()
        [65535, 3, 4]
    """
    shape = next((each.shape[1:] for each in found if each is not None), None)
    if shape is None:
        return None
    return np.concatenate(
        [
            each
            if each is not None and each.shape[1:] == shape
            else np.full((length, *shape), UNROUTED, np.uint16)
            for length, each in zip(lengths, found, strict=True)
        ]
    )


def joined_routes(length: int, parts: Iterable[np.ndarray]) -> np.ndarray | None:
    """Return the routes of a trajectory from those of its generations.

    A token that several generations passed through keeps its first route, under which what
    follows it was sampled.

    Args:
        length: T.
        parts: u16[n, layers, k] each, of the first n tokens; in the order in which they came.

    Returns:
        u16[T, layers, k], UNROUTED where no part tells; None without parts.

    Example:
        >>> first, second = np.array([[[3]], [[UNROUTED]]], "u2"), np.array([[[4]], [[5]]], "u2")
        >>> joined_routes(3, [first, second]).ravel().tolist()
        [3, 5, 65535]
    """
    routes: np.ndarray | None = None
    for part in parts:
        if routes is None:
            routes = np.full((length, *part.shape[1:]), UNROUTED, np.uint16)
        mine = routes[: len(part)]
        mine[...] = np.where(mine == UNROUTED, part, mine)
    return routes


if TYPE_CHECKING:
    from astraflow.core._arrays import is_sound
else:
    try:
        from astraflow.core._arrays import is_sound
    except ImportError:
        is_sound = None

NOT_SAMPLED = -1


class Outcome(StrEnum):
    """What came of a rollout; only what the policy cannot have caused is kept from training."""

    SCORED = "scored"
    TRUNCATED = "truncated"
    POLICY_FAULT = "policy_fault"
    SCORER_FAILED = "scorer_failed"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"
    RETURNED = "returned"


class FinishReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    TIMEOUT = "timeout"
    ABORT = "abort"


class KvPolicy(StrEnum):
    """What an update did to the KV cache of a running generation."""

    UNKNOWN = "unknown"
    KEEP = "keep"
    RECOMPUTE = "recompute"


class ColumnAxis(StrEnum):
    """What the first dimension of a column counts."""

    ROW = "row"
    TOKEN = "token"  # noqa: S105 - an axis, not a secret


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """One array, found by its name; `rollout/v1/column.proto` lists the names."""

    axis: ColumnAxis
    values: np.ndarray


def columns_fault(columns: Mapping[str, Column], *, row_count: int, token_count: int) -> str | None:
    """Say which column has not one entry per row or token, or what no loss can be of, or None."""
    lengths = {ColumnAxis.ROW: row_count, ColumnAxis.TOKEN: token_count}
    for name, column in columns.items():
        axis, values = column.axis, column.values
        if not values.ndim or len(values) != lengths[axis]:
            return f"column {name} does not have one entry per {axis}"
        if name in (TURN_REWARDS, LOSS_WEIGHTS):
            if axis is not ColumnAxis.TOKEN or values.ndim > 1:
                return f"column {name} is not one number per token"
            # NaN is not at most anything.
            if not (np.abs(values) <= np.float32(LARGEST)).all():
                return f"column {name} has numbers that are not finite"
    routes = columns.get(ROUTED_EXPERTS)
    if routes is None:
        return None
    is_sound = routes.values.dtype == np.uint16 and routes.values.ndim == _AXES
    return None if is_sound and routes.axis is ColumnAxis.TOKEN else _NO_ROUTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadColumn:
    """What a column is that lies elsewhere.

    Attributes:
        name: Of the column.
        axis: What its first dimension counts.
        dtype: Of its elements.
        shape: After the first dimension.
    """

    name: str
    axis: ColumnAxis
    dtype: Dtype
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """An object of the run's payload store: the arrays of one trajectory.

    Attributes:
        name: Of the object; never used twice.
        digest: BLAKE3 of it, 32 bytes.
        nbytes: Of it.
        token_count: T of the trajectory.
        columns: What it has beyond tokens, sampled_mask and logprobs.
    """

    name: str
    digest: bytes
    nbytes: int
    token_count: int
    columns: tuple[PayloadColumn, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadStore:
    """Where the arrays of large trajectories lie.

    Attributes:
        url: Of a folder of the run's own.
        above_nbytes: A trajectory whose arrays take so many goes there.
    """

    url: str
    above_nbytes: int


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """A run of sampled tokens of one version.

    Attributes:
        version: That sampled them.
        length: Number of tokens, at least 1.
        kv: What became of the cache when this version took over.
        policy_id: The policy that sampled, where it is not the trajectory's.
    """

    version: int
    length: int
    kv: KvPolicy = KvPolicy.UNKNOWN
    policy_id: PolicyId | None = None


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """What one policy saw and sampled along one branch of a rollout.

    Attributes:
        trajectory_id: Unique for ever.
        policy_id: The policy that trains on it.
        agent: Its name within the workflow; may be empty.
        tokens: i32[T], prompt, completions and what the environment said, in order.
        sampled_mask: bool[T], true on sampled tokens.
        logprobs: f32[T], of each token under the distribution actually sampled from;
            0 where not sampled.
        version_spans: Cover the sampled tokens in order.
        sampling: As used.
        finish_reason: Why it ended.
        parent_trajectory_id: Set on a branch.
        branch_offset: Tokens before it equal the parent's and are trained there.
        segment_index: Order of start among the rollout's trajectories of this policy.
        reward: Where it differs from the rollout's.
        columns: More arrays by name.
        engine: Name and release, for lineage.
        payload: Where its arrays lie; what they are given as is then left out, and to read one of
            them is an AttributeError. None: they are here.
        sampled_count: Sampled tokens.
        received: The message that it came in, which is passed on as it is; None: it came in none
            that can be. A copy with other values has none.

    Raises:
        AstraflowError: ROLLOUT_INVALID when lengths, mask, log-probabilities, spans or columns
            contradict each other, or the reward is not finite or beyond `LARGEST`.
    """

    trajectory_id: TrajectoryId
    policy_id: PolicyId
    agent: str = ""
    tokens: np.ndarray = field(repr=False)
    sampled_mask: np.ndarray = field(repr=False)
    logprobs: np.ndarray = field(repr=False)
    version_spans: tuple[VersionSpan, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    finish_reason: FinishReason
    parent_trajectory_id: TrajectoryId | None = None
    branch_offset: int = 0
    segment_index: int = 0
    reward: float | None = None
    columns: Mapping[str, Column] = field(default_factory=dict[str, Column], repr=False)
    engine: str = ""
    payload: Payload | None = None
    sampled_count: int = field(init=False)
    received: memoryview | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        spans, tokens, mask, logprobs = (
            self.version_spans,
            self.tokens,
            self.sampled_mask,
            self.logprobs,
        )
        sampled_count, are_spans = 0, True
        for span in spans:
            sampled_count += span.length
            are_spans = are_spans and span.length >= 1 and span.version >= 0
        object.__setattr__(self, "sampled_count", sampled_count)
        fault = None
        if not are_spans:
            fault = "a version span needs a length of at least 1 and a version of at least 0"
        elif self.reward is not None and not abs(self.reward) <= LARGEST:
            fault = f"a reward of {self.reward} is not finite, or beyond {LARGEST:g}"
        elif self.payload is not None:
            fault = _payload_fault(self, self.payload)
        elif tokens.dtype != _I32 or mask.dtype != _BOOL:
            fault = "tokens must be i32 and sampled_mask bool"
        elif logprobs.dtype != _F32:
            fault = "logprobs must be f32"
        elif not len(tokens) or not tokens.shape == mask.shape == logprobs.shape:
            fault = "tokens, sampled_mask and logprobs must be arrays of one length, at least 1"
        else:
            arrays = tokens, mask, logprobs, self.branch_offset, sampled_count
            if is_sound is None or not is_sound(*arrays):
                fault = arrays_fault(*arrays)
            if not fault and self.columns:
                fault = columns_fault(self.columns, row_count=1, token_count=len(tokens))
        if fault:
            raise AstraflowError(
                Reason.ROLLOUT_INVALID, f"trajectory {self.trajectory_id}: {fault}"
            )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            # Comes only where there is no such attribute, or a property has raised that.
            if name in (*_ARRAYS, "versions"):
                name = f"{name} of trajectory {self.trajectory_id} lies in the payload store"
            raise AttributeError(name)

    @property
    def token_count(self) -> int:
        """T, wherever the tokens are."""
        return len(self.tokens) if self.payload is None else self.payload.token_count

    @property
    def versions(self) -> np.ndarray:
        """i64[T], the version that sampled each token; -1: not sampled."""
        versions = np.full(len(self.tokens), NOT_SAMPLED, np.int64)
        versions[self.sampled_mask] = np.repeat(
            np.array([span.version for span in self.version_spans], np.int64),
            [span.length for span in self.version_spans],
        )
        return versions


_ARRAYS = ("tokens", "sampled_mask", "logprobs", "columns")

# Those of a batch are added up in 64 bits.
_MOST_TOKENS: Final = 2**31 - 1


def _payload_fault(t: Trajectory, payload: Payload) -> str | None:
    """Leave the arrays out; say what contradicts the payload, as far as is known without it."""
    for name in _ARRAYS:
        object.__delattr__(t, name)
    if payload.token_count < max(1, t.sampled_count, t.branch_offset) or t.branch_offset < 0:
        return f"{payload.token_count} tokens hold neither its spans nor its shared part"
    if payload.token_count > _MOST_TOKENS:
        return f"{payload.token_count} tokens are more than {_MOST_TOKENS}"
    routes = next((each for each in payload.columns if each.name == ROUTED_EXPERTS), None)
    if routes is not None and (routes.dtype is not Dtype.U16 or len(routes.shape) != _AXES - 1):
        return _NO_ROUTES
    return None


def arrays_fault(
    tokens: np.ndarray,
    sampled_mask: np.ndarray,
    logprobs: np.ndarray,
    branch_offset: int,
    sampled_count: int,
) -> str | None:
    """Say what the arrays of a trajectory, of one length, contradict; None: nothing."""
    if np.minimum.reduce(tokens) < 0:
        return "a token id is negative"
    if sampled_count != np.count_nonzero(sampled_mask):
        return "the version spans do not cover the sampled tokens"
    # NaN is neither.
    if not (np.minimum.reduce(logprobs) > -np.inf and np.maximum.reduce(logprobs) <= _SLACK):
        return "a log-probability is not finite or above 0"
    if np.count_nonzero(logprobs.astype(np.bool_) > sampled_mask):
        return "a token that was not sampled has a log-probability"
    if not 0 <= branch_offset <= len(tokens) or np.count_nonzero(sampled_mask[:branch_offset]):
        return "the shared part of a branch lies outside it or is sampled"
    return None


# A log-softmax in single precision may end a few ulps above 0.
_SLACK = 1e-4

_I32, _F32, _BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sample of a group: one run of a workflow, with the trajectories of all policies in it.

    Attributes:
        rollout_id: Unique for ever; the key of redelivery.
        task_id: The task it answers.
        group_id: The group it belongs to.
        sample_index: Which sample of the group.
        outcome: What came of it.
        reward: Set as `Outcome` says; a failure is never a reward of 0.
        reward_parts: What the reward is made of, by name.
        failure: Set unless the outcome is SCORED or TRUNCATED.
        reward_code_digest: BLAKE3 of the scorer's source.
        trajectories: One per policy and branch; parents before children.
        metrics: Numbers for the log.
        start_time: When the workflow began.
        finish_time: When it ended.
        traceparent: W3C trace context.
        received: The message that it came in, which says the same; None: it came in none that can
            be kept. A copy with other values has none.
    """

    rollout_id: RolloutId
    task_id: TaskId
    group_id: GroupId
    sample_index: int
    outcome: Outcome
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: Failure | None = None
    reward_code_digest: bytes = b""
    trajectories: tuple[Trajectory, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    start_time: datetime | None = None
    finish_time: datetime | None = None
    traceparent: str = ""
    received: bytes | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        outcome, is_whole = self.outcome, self.outcome in (Outcome.SCORED, Outcome.TRUNCATED)
        fault = None
        if self.sample_index < 0:
            fault = "sample_index is negative"
        elif self.reward is None:
            if outcome in (Outcome.SCORED, Outcome.POLICY_FAULT):
                fault = f"a rollout that is {outcome} needs a reward"
        elif outcome not in REWARDED or not abs(self.reward) <= LARGEST:
            fault = f"a rollout that is {outcome} has no reward of {self.reward}"
        if fault is None and is_whole is not (self.failure is None):
            does = "has no failure" if is_whole else "says why"
            fault = f"a rollout that is {outcome} {does}"
        if is_whole and not self.trajectories:
            fault = fault or "a rollout without a trajectory has nothing to train on"
        seen: set[TrajectoryId] = set()
        for trajectory in self.trajectories if fault is None else ():
            name, parent = trajectory.trajectory_id, trajectory.parent_trajectory_id
            if name in seen:
                fault = f"trajectory {name} comes twice"
            elif parent is not None and parent not in seen:
                fault = f"trajectory {name} comes before its parent {parent}"
            elif parent is None and trajectory.branch_offset:
                fault = f"trajectory {name} is a branch of nothing"
            seen.add(name)
        if fault:
            raise AstraflowError(Reason.ROLLOUT_INVALID, f"rollout {self.rollout_id}: {fault}")

    @property
    def policy_versions(self) -> Mapping[PolicyId, int]:
        """Oldest version that each policy sampled with."""
        oldest: dict[PolicyId, int] = {}
        for trajectory in self.trajectories:
            for span in trajectory.version_spans:
                policy = span.policy_id or trajectory.policy_id
                oldest[policy] = min(span.version, oldest.get(policy, span.version))
        return oldest


REWARDED = frozenset({Outcome.SCORED, Outcome.TRUNCATED, Outcome.POLICY_FAULT})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """Why a sample has no rollout."""

    sample_index: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Closes a task: no more rollouts of it will come.

    Attributes:
        rollout_count: How many were sent.
        failures: Samples of which no rollout was sent.
    """

    task_id: TaskId
    rollout_count: int
    failures: tuple[SampleFailure, ...] = ()


class Disposition(StrEnum):
    """What the run did with a rollout or a task result."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    DROPPED = "dropped"
    REJECTED = "rejected"


@fast_init
@dataclass(frozen=True, slots=True, kw_only=True)
class ItemAck:
    """The answer to one rollout or task result.

    Attributes:
        item_id: rollout_id, or task_id for a result.
        disposition: What the run did with it.
        reason: Why it was not kept; None when it was.
        message: For people.
    """

    item_id: str
    disposition: Disposition
    reason: Reason | None = None
    message: str = ""


def spans_of(versions: np.ndarray) -> tuple[VersionSpan, ...]:
    """Fold per-token versions into spans.

    Args:
        versions: i64[n] of the sampled tokens, in order.

    Example:
        >>> [(s.version, s.length) for s in spans_of(np.array([4, 4, 5]))]
        [(4, 2), (5, 1)]
    """
    if not len(versions):
        return ()
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return tuple(VersionSpan(version=int(versions[a]), length=b - a) for a, b in pairwise(edges))
