"""Capacity: what members were measured to do, and the pool by what each could take now."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Generic, Protocol, TypeVar, cast

from astraflow.core.ids import MemberId
from astraflow.core.tasks import Prompt

# Weight of the newest rollout in a mean: the last 16 or so count.
_WEIGHT: Final = 1 / 16

_LOOK_EVERY: Final = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Speed:
    """How fast one RaaS is.

    Means fall off by 1/16 per rollout. By Little's law the whole member makes
    `load / token_s` tokens per second.

    Attributes:
        token_s: Seconds per sampled token of one rollout, from its issue to its acceptance: the
            way, the queue and the wait for a version are in it. 0: not measured yet.
        load: Samples that were out at the member meanwhile.
        capacity: Samples at once, as the member says of itself.
    """

    token_s: float = 0.0
    load: float = 0.0
    capacity: int = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self.token_s > 0

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of the whole member; 0: not measured."""
        return self.load / self.token_s if self.is_known else 0.0

    def note(self, *, seconds: float, token_count: int, outstanding: int) -> None:
        """Count one accepted rollout.

        Args:
            seconds: From its issue to its acceptance.
            token_count: Sampled tokens in it.
            outstanding: Samples out at the member, this one included.
        """
        token_s = max(seconds, 1e-6) / max(1, token_count)
        load = float(max(1, outstanding))
        if not self.is_known:
            self.token_s, self.load = token_s, load
            return
        self.token_s += _WEIGHT * (token_s - self.token_s)
        self.load += _WEIGHT * (load - self.load)

    def finish_s(self, *, token_count: float, outstanding: int, count: int) -> float:
        """Return in how many seconds new samples would be done; 0: not measured.

        As many as were out when it was measured, or as it says that it works on at once, take as
        long as these took; more of them share the same engine. A member that had little to do for a
        while is not taken for a small one.

        Args:
            token_count: Expected per sample.
            outstanding: Samples out at the member now.
            count: New ones.

        Example:
            0.01 s per token at a load of 16, 100 tokens: 1 s with 8 out and 8 new ones, 1.5 s with
            16 out and 8 new ones. At a load of 4 and a capacity of 16 the same.
        """
        return self.pace_s(outstanding=outstanding, count=count) * token_count

    def pace_s(self, *, outstanding: int, count: int) -> float:
        """Return the seconds per token that new samples would take; 0: not measured."""
        if not self.is_known:
            return 0.0
        return self.token_s * max(1.0, (outstanding + count) / max(self.load, self.capacity))


def _fastest(speeds: Iterable[Speed]) -> Speed | None:
    """Return the first one that nobody beats; None: nobody was measured."""
    fastest, token_s = None, inf
    for speed in speeds:
        if 0 < speed.token_s < token_s:
            fastest, token_s = speed, speed.token_s
    return fastest


class Measured:
    """What is expected of the pool and of prompts.

    Rollouts are as long as they were lately; a long prompt costs more than a short one.

    Attributes:
        fastest_token_s: Of the fastest member, as it is now; 0: nobody was measured. Who that is,
            is looked up anew every so many rollouts.
        mean_size: Letters per prompt.
        token_count: Sampled tokens of all accepted rollouts.
        eval_token_count: Of them, those of evaluations.
        eval_rollout_count: Rollouts of evaluations.
    """

    _fastest: Speed | None = None
    eval_token_count: int = 0
    eval_rollout_count: int = 0

    def __init__(self) -> None:
        self.fastest_token_s = 0.0
        self.mean_size = 0.0
        self.token_count = 0
        self._tokens = 0.0
        self._count = 0

    def note(self, token_count: int, speeds: Iterable[Speed], *, is_eval: bool = False) -> None:
        """Count one accepted rollout.

        Args:
            token_count: Sampled tokens in it.
            speeds: Of the pool.
            is_eval: Whether it is of an evaluation.
        """
        self.token_count += token_count
        self.eval_token_count += token_count * is_eval
        self.eval_rollout_count += is_eval
        weight = _WEIGHT if self._tokens else 1.0
        self._tokens += weight * (token_count - self._tokens)
        if self._count % _LOOK_EVERY == 0:
            self._fastest = _fastest(speeds)
        # Nobody is slow beside what the fastest one was before it slowed down itself.
        self.fastest_token_s = self._fastest.token_s if self._fastest else 0.0
        self._count += 1

    @property
    def rollout_count(self) -> int:
        """Accepted rollouts that have sampled tokens."""
        return self._count

    def note_prompt(self, size: int) -> None:
        """Count one prompt that was issued."""
        weight = _WEIGHT if self.mean_size else 1.0
        self.mean_size += weight * (size - self.mean_size)

    def expected_tokens(self, size: int) -> float:
        """Return how many tokens a rollout of a prompt will sample; 0: nothing is known.

        A prompt of twice the mean length is expected to cost twice as much, within 1/2 and 4.
        """
        ratio = size / self.mean_size if self.mean_size else 1.0
        return self._tokens * min(4.0, max(0.5, ratio))


def size_of(prompt: Prompt) -> int:
    """Return how many letters a prompt has, in all its fields."""
    return sum(map(_letters, prompt.fields.values()))


def _letters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_letters, cast("Mapping[str, object]", value).values()))
    if isinstance(value, list | tuple):
        return sum(map(_letters, cast("Sequence[object]", value)))
    return 1


class IndexedMember(Protocol):
    """What is entered of a member."""

    @property
    def member_id(self) -> MemberId:
        """Who."""
        ...

    @property
    def number(self) -> int:
        """Rises by one per session that is opened."""
        ...

    @property
    def serves_any(self) -> bool:
        """Whether it holds a version of anything; before that it gets nothing."""
        ...

    @property
    def outstanding(self) -> int:
        """Samples that it holds."""
        ...

    @property
    def free_count(self) -> int:
        """Samples of training that it can take."""
        ...

    @property
    def eval_free_count(self) -> int:
        """Samples of evaluations that it can take."""
        ...

    @property
    def speed(self) -> Speed:
        """As measured."""
        ...


_NEW: Final = 0

_MEASURED: Final = 1

_SERVES_NOTHING: Final = 2

_T = TypeVar("_T", bound=IndexedMember)

# Free credit, and what is known of who has it.
_Bucket = tuple[int, int]

_Place = tuple[float, int, int]


class CapacityIndex(Generic[_T]):
    """Members by the samples that they could take now, each bucket of them by pace.

    A change of one member takes a search in its bucket, when somebody looks.

    Attributes:
        unit: Samples that are mostly placed at once. The pace of a member is the seconds per token
            that these would take with all that it holds; 0: not measured.
    """

    unit: int = 1

    def __init__(self, *, unit: int, is_eval: bool = False) -> None:
        """Begin with nobody.

        Args:
            unit: Samples that are mostly placed at once.
            is_eval: Whether credit is that for evaluations, else for training.
        """
        self.unit = unit
        self._is_eval = is_eval
        self._places: dict[MemberId, tuple[_Bucket, _Place]] = {}
        self._buckets: dict[_Bucket, list[_Place]] = {}
        self._members: dict[int, _T] = {}
        self._changed: dict[MemberId, _T] = {}

    def note(self, member: _T) -> None:
        """Enter a member, with its free credit and its pace when somebody looks."""
        self._changed[member.member_id] = member

    def _enter_changed(self) -> None:
        changed, self._changed = self._changed, {}
        for member in changed.values():
            free = member.eval_free_count if self._is_eval else member.free_count
            self._enter(member, free)

    def _enter(self, member: _T, free: int) -> None:
        out = member.outstanding
        bucket = free, _kind(member)
        place = member.speed.pace_s(outstanding=out, count=self.unit), out, member.number
        if self._places.get(member.member_id) != (bucket, place):
            self._take_out(member.member_id)
            self._places[member.member_id] = bucket, place
            self._members[member.number] = member
            insort(self._buckets.setdefault(bucket, []), place)

    def forget(self, member_id: MemberId) -> None:
        """Take a member out; one that is not here changes nothing."""
        self._changed.pop(member_id, None)
        self._take_out(member_id)

    def _take_out(self, member_id: MemberId) -> None:
        found = self._places.pop(member_id, None)
        if found is None:
            return
        bucket, place = found
        places = self._buckets[bucket]
        del places[bisect_left(places, place)]
        del self._members[place[2]]
        if not places:
            del self._buckets[bucket]

    def buckets(self, count: int) -> Iterator[tuple[int, Iterator[tuple[float, _T]]]]:
        """Yield who has credit for so many samples, at least one, and serves anything.

        First the credit, then those who have it, with their paces. Those with the same credit are
        together, those that were not measured yet by themselves. Of each bucket who has the least
        pace comes first, then who holds least, and who joined first.
        """
        self._enter_changed()
        for (free, kind), places in self._buckets.items():
            if free >= max(1, count) and kind != _SERVES_NOTHING:
                yield free, ((pace_s, self._members[number]) for pace_s, _, number in places)

    def with_capacity(self, count: int) -> Iterator[_T]:
        """Yield the same members one by one."""
        for _, bucket in self.buckets(count):
            for _, member in bucket:
                yield member

    def has_credit(self, count: int) -> bool:
        """Whether anybody has credit for so many samples, be it one that serves nothing yet."""
        self._enter_changed()
        return any(free >= max(1, count) for free, _ in self._buckets)


def _kind(member: IndexedMember) -> int:
    if not member.serves_any:
        return _SERVES_NOTHING
    return _MEASURED if member.speed.is_known else _NEW
