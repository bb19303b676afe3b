"""Scheduler: which RaaS gets a task, and how many samples of it.

Whoever would be done first by what was measured of it, as long as that is in time: work that would
be too old when it is done waits for a faster member. Samples of a group stay together, so that the
engine reads their prompt once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from math import floor, inf
from typing import Final

from astraflow.core.groups import SampleGroup
from astraflow.core.ids import PolicyId
from astraflow.core.policy.state import PolicyState, newest_versions
from astraflow.core.pool.capacity import Measured, size_of
from astraflow.core.pool.live_members import CapacityIndex, LiveRaas
from astraflow.core.pool.sessions import Sessions
from astraflow.core.settings import RunSettings
from astraflow.core.tasks import Prompt, VersionRange
from astraflow.core.work.prompt_queue import PromptQueue

# Prompts that a slow RaaS may choose from, and how often the first one is passed over.
_LOOK_AHEAD: Final = 8


@dataclass(frozen=True, slots=True)
class MemberCapacity:
    """What one RaaS could take.

    Attributes:
        free: Samples at once, now.
        most: Samples at once, when it has nothing else.
    """

    member: LiveRaas
    free: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What is to be placed.

    Attributes:
        count: Samples.
        token_count: Expected of each; 0: unknown.
        fastest_token_s: Seconds per token of the fastest member; 0: unknown. Who was not measured
            yet is taken to be as fast.
        slack_s: After how many seconds the samples are too old to who serves versions; None: never.
        latest_s: The same of the member that has most time, or more.
    """

    count: int
    token_count: float = 0.0
    fastest_token_s: float = 0.0
    slack_s: Callable[[Mapping[PolicyId, int]], float] | None = None
    latest_s: float = inf

    def finish_s(self, member: LiveRaas, outstanding: int) -> float:
        """Return in how many seconds a member that holds so many would be done with them."""
        pace_s = member.speed.pace_s(outstanding=outstanding, count=self.count)
        return (pace_s or self.fastest_token_s) * self.token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """The pool as one placement sees it.

    Attributes:
        index: Members by their credit.
        pool: All members.
        is_fit: Whether a member may get it.
        capacity_of: What a member could take.
    """

    index: CapacityIndex
    pool: Iterable[LiveRaas]
    is_fit: Callable[[LiveRaas], bool]
    capacity_of: Callable[[LiveRaas], MemberCapacity]

    def all(self) -> Iterator[MemberCapacity]:
        """Yield what each member could take that may get it."""
        return (self.capacity_of(member) for member in self.pool if self.is_fit(member))


def choose(view: PoolView, request: PlacementRequest) -> MemberCapacity | None:
    """Return where to place samples; it may be fewer than wanted, see `MemberCapacity.free`.

    Of those who are done in time the first one to be done; then most free credit, the least
    loaded, and who joined first. Samples stay together when some RaaS could ever take all of them;
    None: wait for it.

    Example:
        8 samples, two RaaS of credit 16 with 5 and 7 free: None. Of credit 4 with 3 and 4
        free: the second, for 4 samples. Two with room, one done in 2 s, one in 9 s, and what is
        asked for is too old in 5 s: the first; when that has no room, None.
    """
    for count in (request.count, 1):
        room = _best(view, request, count, latest_s=request.latest_s)
        if room is not None:
            return room
        late = _best(view, request, count, latest_s=None)
        if late is not None:
            return None if _is_worth_a_wait(view, request, count) else late
        if any(other.most >= count for other in view.all()):
            return None
    return None


def _is_worth_a_wait(view: PoolView, request: PlacementRequest, count: int) -> bool:
    """Whether somebody who has no room now would be done in time if he had nothing else."""
    least = request.count
    if count < least:
        least = min(least, max((other.free for other in view.all()), default=0))
    slack_s, unknown_s = request.slack_s, request.fastest_token_s * request.token_count
    for member in view.pool:
        # First what costs least and rules most of them out: the pool may be large.
        speed = member.speed
        alone_s = speed.token_s * request.token_count if speed.token_s else unknown_s
        if (
            alone_s <= request.latest_s
            and (slack_s is None or request.finish_s(member, 0) <= slack_s(member.live))
            and view.is_fit(member)
            and view.capacity_of(member).most >= least
        ):
            return True
    return False


def _best(
    view: PoolView, request: PlacementRequest, count: int, *, latest_s: float | None
) -> MemberCapacity | None:
    """Return the room of the lowest rank; members that cannot have it are passed over.

    Args:
        view: The pool.
        request: What is to be placed.
        count: Samples that there must be room for.
        latest_s: Nobody has more time than this, and who is not done in time is passed over; None:
            everybody has all the time.
    """
    best: MemberCapacity | None = None
    rank = (inf, 0, 0, 0)
    slack_s = request.slack_s
    # The pace of a member is that for `unit` samples: with fewer nobody is done before this.
    is_unit = request.count == view.index.unit
    share = min(1.0, request.count / view.index.unit)
    for free, bucket in view.index.buckets(count):
        for pace_s, member in bucket:
            outstanding = member.outstanding
            least_s = (pace_s or request.fastest_token_s) * request.token_count
            if pace_s:
                least_s *= share
            if least_s > (rank[0] if latest_s is None else min(rank[0], latest_s)):
                break
            if (least_s, -free, outstanding, member.number) >= rank:
                if request.token_count or not pace_s:
                    break  # Who comes later in this bucket has no lower rank.
                continue
            finish_s = least_s if is_unit else request.finish_s(member, outstanding)
            if latest_s is not None and slack_s is not None and finish_s > slack_s(member.live):
                continue
            if not view.is_fit(member) or (room := view.capacity_of(member)).free < count:
                continue
            mine = finish_s, -room.free, outstanding, member.number
            if mine < rank:
                best, rank = room, mine
    return best


def pick(sizes: Sequence[int], *, mean: float) -> int:
    """Return which of the next prompts a slow member gets: a short one.

    Example:
        Prompts of 900, 400 and 500 letters, 500 on average: a slow member gets the second, any
        other the first.
    """
    if sizes[0] <= mean:
        return 0
    return min(range(len(sizes)), key=lambda index: (sizes[index], index))


def is_slow(member: LiveRaas, fastest_token_s: float) -> bool:
    """Whether a member takes half as long again per token as the fastest one."""
    return member.speed.token_s > 1.5 * fastest_token_s > 0


def training_capacity(member: LiveRaas) -> MemberCapacity:
    return MemberCapacity(member, member.free_count, member.max_outstanding)


def eval_capacity(member: LiveRaas, share: float) -> MemberCapacity:
    """Return what a RaaS could take of evaluations that may have a share of its credit.

    What it takes beyond its credit counts first, and is no loss to training.

    Example:
        Credit 40 and 4 beyond it, all of the 40 at work, a share of 0.1: 4. A share of 0.2: 4 now,
        and 4 more once training gives up some of its room.
    """
    most = member.max_outstanding
    if member.max_eval_outstanding is not None:
        most = min(most, member.max_eval_outstanding)
    most = min(most + member.max_eval_extra, max(1, floor(share * member.max_outstanding)))
    free = max(0, min(member.eval_free_count, most - member.eval_outstanding))
    return MemberCapacity(member, free, most)


def keeps_up(
    member: LiveRaas, minimum: Mapping[PolicyId, int], newest: Mapping[PolicyId, int]
) -> bool:
    """Whether work of at least these versions is served soon.

    A RaaS that is one version behind is about to update, unless it just failed to; one that
    is further behind costs only itself.
    """
    for policy_id, wanted in minimum.items():
        live = member.live.get(policy_id)
        if live is None:
            return False
        if live >= min(wanted, newest[policy_id]):
            continue
        if live < wanted - 1 or member.failed.get(policy_id) == newest[policy_id]:
            return False
    return True


def may_serve_pinned(member: LiveRaas, versions: Mapping[PolicyId, int]) -> bool:
    """Whether a RaaS serves exactly these versions: live, kept since they were, or to come."""
    for policy_id, version in versions.items():
        live = member.live.get(policy_id)
        if live is None or (policy_id, version) in member.refused:
            return False
        if live > version and (policy_id, version) not in member.pinned:
            return False
        if live < version <= member.failed.get(policy_id, -1):
            return False
    return True


@dataclass(slots=True, kw_only=True, eq=False)
class Scheduler:
    """Looks over the pool for training."""

    settings: RunSettings
    policies: Mapping[PolicyId, PolicyState]
    sessions: Sessions
    measured: Measured
    _passed_count: int = field(init=False, default=0)
    _policy_ids: tuple[PolicyId, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._policy_ids = self.settings.workflow.policy_ids

    @property
    def has_credit(self) -> bool:
        """Whether anybody has credit for a group, or for some of it where nobody ever has more."""
        index = self.sessions.capacity_index
        count = index.unit
        if index.has_credit(count):
            return True
        if not index.has_credit(1):
            return False
        return not any(member.max_outstanding >= count for member in self.sessions.pool.values())

    def take_prompt(self, prompts: PromptQueue, first: Prompt, member: LiveRaas) -> Prompt:
        """Take the next prompt for a RaaS; a slow one gets a short one of the next few."""
        measured = self.measured
        index, size = 0, size_of(first)
        if self._passed_count < _LOOK_AHEAD and is_slow(member, measured.fastest_token_s):
            sizes = [size_of(prompt) for prompt in prompts.peek(_LOOK_AHEAD)]
            index = pick(sizes, mean=measured.mean_size)
            size = sizes[index]
        self._passed_count = self._passed_count + 1 if index else 0
        measured.note_prompt(size)
        return prompts.take(index)

    def is_suspect(self, group: SampleGroup) -> bool:
        """Whether one more lost member gives a prompt up.

        Several of them are never at one member: when that is lost, it tells which one did it.
        """
        return 0 < group.loss_count >= self.settings.rollouts.max_lost - 1

    def find(
        self,
        prompt: Prompt,
        count: int,
        policies: Sequence[PolicyState],
        versions: Mapping[PolicyId, VersionRange],
        now: datetime,
        *,
        is_suspect: bool = False,
    ) -> MemberCapacity | None:
        """Return where samples of a prompt go; None: they wait."""
        sessions = self.sessions
        newest = newest_versions(self.policies, self._policy_ids)
        if newest is None:
            return None
        minimum = {p: bounds.min or 0 for p, bounds in versions.items()}

        @cache
        def is_fit(member: LiveRaas) -> bool:
            return (
                not member.is_draining
                and not sessions.is_silent(member, now)
                and keeps_up(member, minimum, newest)
                # Another such prompt would share the fate of the first.
                and not (
                    is_suspect
                    and any(self.is_suspect(each.group) for each in member.assignments.values())
                )
            )

        index = sessions.capacity_index
        if not any(is_fit(member) for _, bucket in index.buckets(1) for _, member in bucket):
            return None
        slack_s = slack_of(policies, minimum)
        view = PoolView(
            index=index,
            pool=sessions.pool.values(),
            is_fit=is_fit,
            capacity_of=training_capacity,
        )
        request = PlacementRequest(
            count=min(count, index.unit),
            token_count=self.measured.expected_tokens(size_of(prompt)),
            fastest_token_s=self.measured.fastest_token_s,
            slack_s=slack_s,
            latest_s=inf if slack_s is None else slack_s(newest),
        )
        return choose(view, request)


def slack_of(
    policies: Iterable[PolicyState], minimum: Mapping[PolicyId, int]
) -> Callable[[Mapping[PolicyId, int]], float] | None:
    """Return what says in how many seconds work issued now is too old to who serves versions.

    It is sampled from what is live there, or from the version that it has to wait for, and is
    trained on at most `max_staleness` versions later, at the pace of the last batches.

    Returns:
        Given the version of each policy that is live somewhere, the seconds. None: it is never too
        old: without staleness the trainer waits for all that is open, and versions that come when
        they are asked for have no pace.

    Example:
        The next batch trains on version 8, a batch takes 10 s, max_staleness is 2. Sampled from
        version 7, the last batch for it trains on version 9, in 20 s: that is the slack.
    """
    known: list[tuple[PolicyState, int, int, float]] = []
    for policy in policies:
        staleness, steps = policy.settings.max_staleness, policy.settings.steps_per_version
        cadence_s = policy.window.cadence_s
        if staleness and steps is not None and cadence_s is not None:
            known.append((policy, staleness + 1 - policy.progress.train_version, steps, cadence_s))
    if not known:
        return None

    def slack_s(live: Mapping[PolicyId, int]) -> float:
        least_s = inf
        for policy, left, steps, cadence_s in known:
            sampled = max(live.get(policy.policy_id, 0), minimum[policy.policy_id])
            last = policy.versions.weights_number(sampled) + left
            least_s = min(least_s, max(0, last) * steps * cadence_s)
        return least_s

    return slack_s
