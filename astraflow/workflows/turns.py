"""Turns: each generation is a node of a tree of tokens, and a path of them a trajectory.

A workflow says itself what goes on from what. For an agent the tokens do: a prompt that begins with
all tokens of an earlier turn extends it; any other begins anew. What extends each other is one
trajectory, with a seed of its own; where a turn is extended twice, the second is a branch. A turn
extends those of its temperature alone, under which a trainer scores all of a trajectory.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from astraflow.core.ids import PolicyId, TrajectoryId
from astraflow.core.rollouts import (
    ROUTED_EXPERTS,
    Column,
    ColumnAxis,
    FinishReason,
    Trajectory,
    VersionSpan,
    joined_routes,
)
from astraflow.core.tasks import SamplingParams
from astraflow.engines.protocol import Generation


def trajectory_seed(seed: int | None, index: int) -> int | None:
    """Return the seed of an episode's trajectory, in [0, 2**63); the first has the sample's own."""
    if seed is None or index == 0:
        return seed
    return mixed_seed(seed, index)


def mixed_seed(seed: int | None, other: int) -> int:
    """Return a seed made of two, in [0, 2**63); None is a seed like any other."""
    digest = hashlib.blake2b(f"{seed}/{other}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One generation.

    Attributes:
        parent: What it extends; None: nothing.
        seen: i32[n], what the policy was told since the end of its parent.
        generation: What it sampled, at least one token.
        sampling: As used.
        start: Tokens before the first sampled one.
    """

    parent: "Turn | None"
    seen: np.ndarray
    generation: Generation
    sampling: SamplingParams
    start: int

    @property
    def end(self) -> int:
        """Tokens up to its last one."""
        return self.start + len(self.generation.tokens)

    @property
    def is_cut(self) -> bool:
        """Whether a token budget ended it."""
        return self.generation.finish_reason is FinishReason.LENGTH

    @property
    def sampled_mask(self) -> np.ndarray:
        """bool[n], which of its tokens the policy drew as it would have without a grammar."""
        constrained = self.generation.constrained
        count = len(self.generation.tokens)
        return np.ones(count, np.bool_) if constrained is None else ~constrained

    @property
    def path(self) -> "tuple[Turn, ...]":
        """All turns from the first to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return tuple(reversed(turns))

    @property
    def tokens(self) -> np.ndarray:
        """i32[end], all tokens up to its last one, seen and sampled."""
        return tokens_of(self.path)


def tokens_of(path: Sequence[Turn]) -> np.ndarray:
    """Return i32[n], all tokens of turns that go on from each other, seen and sampled."""
    parts = [part for turn in path for part in (turn.seen, turn.generation.tokens)]
    return np.concatenate(parts).astype(np.int32, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opening:
    """Where a generation that is about to begin hangs.

    Attributes:
        parent: The turn that it extends.
        prompt: i32[n], all tokens before it.
        branch: Number of its branch; turns of one branch draw with one seed.
    """

    parent: Turn | None
    prompt: np.ndarray
    branch: int


@dataclass(slots=True, eq=False)
class _Place:
    """A turn, or the root, and what hangs there."""

    branch: int
    children: list[Turn] = field(default_factory=list[Turn])
    is_extended: bool = False


class TurnTree:
    """The turns of one policy in one episode."""

    def __init__(self) -> None:
        """Start empty."""
        self.turns: list[Turn] = []
        """In the order in which they ended."""
        self._places: dict[Turn | None, _Place] = {None: _Place(branch=0)}
        self._branch_count = 1

    def open(self, prompt: Sequence[int] | np.ndarray, *, temperature: float = 1.0) -> Opening:
        """Return where a generation after `prompt` hangs; its branch is taken from now on."""
        ids = np.asarray(prompt, np.int32)
        parent = self._deepest(ids, temperature)
        place = self._places[parent]
        branch = place.branch
        if place.is_extended:
            branch, self._branch_count = self._branch_count, self._branch_count + 1
        place.is_extended = True
        return Opening(parent=parent, prompt=ids, branch=branch)

    def add(self, opening: Opening, generation: Generation, sampling: SamplingParams) -> Turn:
        """Keep what was sampled."""
        parent = opening.parent
        turn = Turn(
            parent=parent,
            seen=opening.prompt[parent.end if parent else 0 :],
            generation=generation,
            sampling=sampling,
            start=len(opening.prompt),
        )
        if len(generation.tokens):
            self.turns.append(turn)
            self._places[parent].children.append(turn)
            self._places[turn] = _Place(branch=opening.branch)
        return turn

    def paths(self) -> Iterator[tuple[Turn, ...]]:
        """Yield the turns of every branch, from the first one, in the order of their last ones."""
        for turn in self.turns:
            if not self._places[turn].children:
                yield turn.path

    def _deepest(self, prompt: np.ndarray, temperature: float) -> Turn | None:
        """Return the last turn whose tokens all stand at the start of `prompt`, i32[n]."""
        found: Turn | None = None
        while (turn := self._child(found, prompt, temperature)) is not None:
            found = turn
        return found

    def _child(self, parent: Turn | None, prompt: np.ndarray, temperature: float) -> Turn | None:
        """Return the newest turn after `parent` that `prompt` goes on from."""
        at = parent.end if parent else 0
        for turn in reversed(self._places[parent].children):
            if (
                turn.sampling.temperature == temperature
                and turn.end <= len(prompt)
                and np.array_equal(prompt[at : turn.start], turn.seen)
                and np.array_equal(prompt[turn.start : turn.end], turn.generation.tokens)
            ):
                return turn
        return None


def trajectories_of(
    tree: TurnTree, policy_id: PolicyId, *, engine: str, prefix: str
) -> Iterator[Trajectory]:
    """Yield a trajectory per branch; a turn that several share is trained on in the first.

    A branch is left out in which nothing can be trained on.

    Example: turns a, b after a, and c after a: [a b], and [a c] as its branch with `a` masked.
    """
    homes: dict[Turn, TrajectoryId] = {}
    for number, path in enumerate(tree.paths()):
        name = TrajectoryId(f"{prefix}/{number}")
        own = [turn for turn in path if turn not in homes]
        parent = homes.get(own[0].parent) if own[0].parent else None
        made = trajectory_of(own, policy_id, engine=engine, name=name, parent=parent, index=number)
        if made.sampled_count:
            yield made
            homes |= dict.fromkeys(own, name)


def trajectory_of(
    own: Sequence[Turn],
    policy_id: PolicyId,
    *,
    engine: str,
    agent: str = "",
    name: TrajectoryId,
    parent: TrajectoryId | None,
    index: int,
    reward: float | None = None,
    finish_reason: FinishReason | None = None,
) -> Trajectory:
    """Return the trajectory that ends with the last of some turns.

    Args:
        own: At least one, each after the one before; what comes before them is masked, and so is
            what a grammar drew otherwise than the policy would have: its score has another mean.
        policy_id: Who sampled.
        engine: Name and release.
        agent: What it is in the workflow.
        name: Of the trajectory.
        parent: Where the turns before `own` are trained on; None: there are none.
        index: Of the trajectory among those of its policy.
        reward: Where it differs from the rollout's.
        finish_reason: None: that of the last turn.
    """
    first, last = own[0], own[-1]
    path, length = last.path, last.end
    routed = [turn.generation.routed_experts for turn in path]
    known = [each for each in routed if each is not None]
    routes = joined_routes(length, known) if known else None
    mask, logprobs = np.zeros(length, np.bool_), np.zeros(length, np.float32)
    spans: list[VersionSpan] = []
    for turn in own:
        sampled, where = turn.sampled_mask, slice(turn.start, turn.end)
        mask[where] = sampled
        logprobs[where] = np.where(sampled, turn.generation.logprobs, 0)
        spans += _own_spans(turn, sampled)
    return Trajectory(
        trajectory_id=name,
        policy_id=policy_id,
        agent=agent,
        tokens=tokens_of(path),
        sampled_mask=mask,
        logprobs=logprobs,
        version_spans=tuple(spans),
        sampling=last.sampling,
        finish_reason=finish_reason or last.generation.finish_reason,
        parent_trajectory_id=parent,
        branch_offset=first.parent.end if first.parent else 0,
        segment_index=index,
        reward=reward,
        columns={}
        if routes is None
        else {ROUTED_EXPERTS: Column(axis=ColumnAxis.TOKEN, values=routes)},
        engine=engine,
    )


def _own_spans(turn: Turn, sampled: np.ndarray) -> Iterator[VersionSpan]:
    """Yield the version spans of a turn without what a grammar drew."""
    at = 0
    for span in turn.generation.version_spans:
        length = int(np.count_nonzero(sampled[at : at + span.length]))
        at += span.length
        if length:
            yield replace(span, length=length)
