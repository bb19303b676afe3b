"""Capacity: what members were measured to do, and how long rollouts are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

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
    def tokens_per_s(self) -> float:
        """Sampled tokens of the whole member; 0: not measured."""
        return self.load / self.token_s if self.token_s else 0.0

    def note(self, *, seconds: float, token_count: int, outstanding: int) -> None:
        """Count one accepted rollout."""
        token_s = max(seconds, 1e-6) / max(1, token_count)
        load = float(max(1, outstanding))
        if not self.token_s:
            self.token_s, self.load = token_s, load
            return
        self.token_s += _WEIGHT * (token_s - self.token_s)
        self.load += _WEIGHT * (load - self.load)

    def pace_s(self, *, outstanding: int, count: int) -> float:
        """Return the seconds per token that new samples would take; 0: not measured.

        As many as were out when it was measured, or as it says that it works on at once, take as
        long as these took; more of them share the same engine. A member that had little to do for a
        while is not taken for a small one.

        Args:
            outstanding: Samples out at the member now.
            count: New ones.

        Example:
            0.01 s per token at a load of 16: the same with 8 out and 8 new ones, 0.015 s with 16
            out and 8 new ones. At a load of 4 and a capacity of 16 the same.
        """
        if not self.token_s:
            return 0.0
        return self.token_s * max(1.0, (outstanding + count) / max(self.load, self.capacity))


class Measured:
    """What is expected of the pool and of prompts.

    Rollouts are as long as they were lately; a long prompt costs more than a short one.

    Attributes:
        fastest_token_s: Of the fastest member, as it is now; 0: nobody was measured. Who that is,
            is looked up anew every so many rollouts.
        mean_size: Letters per prompt.
        rollout_count: Accepted rollouts that have sampled tokens.
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
        self.rollout_count = 0

    def note(self, token_count: int, speeds: Iterable[Speed], *, is_eval: bool = False) -> None:
        """Count one accepted rollout."""
        self.token_count += token_count
        self.eval_token_count += token_count * is_eval
        self.eval_rollout_count += is_eval
        weight = _WEIGHT if self._tokens else 1.0
        self._tokens += weight * (token_count - self._tokens)
        if self.rollout_count % _LOOK_EVERY == 0:
            known = [speed for speed in speeds if speed.token_s]
            self._fastest = min(known, key=lambda speed: speed.token_s, default=None)
        # Nobody is slow beside what the fastest one was before it slowed down itself.
        self.fastest_token_s = self._fastest.token_s if self._fastest else 0.0
        self.rollout_count += 1

    def note_prompt(self, size: int) -> None:
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
    return sum([len(v) if type(v) is str else _letters(v) for v in prompt.fields.values()])


def _letters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_letters, cast("Mapping[str, object]", value).values()))
    if isinstance(value, list | tuple):
        return sum(map(_letters, cast("Sequence[object]", value)))
    return 1
