"""Rates: how fast this machine codes and decodes in each profile, measured once per process.

What a patch costs a reader is a pass over what it holds, and work for what changed. So two samples
are decoded of which unlike shares changed, and both rates follow: with 4 MiB in 0.5 ms where the
payload has 5 KB and in 1.5 ms where it has 105 KB, 100 KB take 1 ms, and the pass 0.45 ms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from threading import Lock
from time import perf_counter, thread_time
from typing import Final

import numpy as np
from blake3 import blake3

from astraflow.codec import kernels
from astraflow.codec.chunks import CHUNK_NBYTES, Profile, Runs
from astraflow.codec.decode import decode_change, decode_whole
from astraflow.codec.encode import EncodedPatch, encode_patch, encode_whole, flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.tensors import Dtype, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRate:
    """What one core decodes of a profile, verifies and applies, in bytes per second.

    Attributes:
        profile: How the patch is coded.
        model_bytes_per_s: Of what is held, which is passed over for a patch from a base.
        payload_bytes_per_s: Of the payload, besides.
        whole_bytes_per_s: Of the version, for a patch from nothing.
    """

    profile: Profile
    model_bytes_per_s: float
    payload_bytes_per_s: float
    whole_bytes_per_s: float

    def seconds(self, model_nbytes: int, payload_nbytes: int, *, is_whole: bool) -> float:
        """Return how long one core takes for a patch.

        Args:
            model_nbytes: Of the version.
            payload_nbytes: Of the patch.
            is_whole: Whether it leads from nothing.
        """
        if is_whole:
            return model_nbytes / self.whole_bytes_per_s
        passing = model_nbytes / self.model_bytes_per_s
        return passing + payload_nbytes / self.payload_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRates:
    """Of this machine, at one level of the kernels.

    Attributes:
        decode: By profile.
        encode_bytes_per_s: By profile: of the model, for a patch from a base.
    """

    decode: Mapping[Profile, DecodeRate]
    encode_bytes_per_s: Mapping[Profile, float]


def measured_rates() -> CodecRates:
    """Return the rates of this machine; the first call takes some 0.1 s, and 0.3 s with numpy."""
    with _MEASURING:
        return _measured(kernels.level())


# A node pulls many policies at once, each of which asks: who measures beside others takes longer.
_MEASURING: Final = Lock()
_SHARES: Final = (0.002, 0.02)
_REPEATS: Final = 7
_ENOUGH_S: Final = 0.006
_FASTEST: Final = 1e12


@cache
def _measured(level: kernels.KernelLevel) -> CodecRates:
    is_compiled = level is not kernels.KernelLevel.NUMPY
    count = CHUNK_NBYTES // Dtype.BF16.itemsize // (1 if is_compiled else 4)
    layout = Layout.of([("w", Dtype.BF16, (count,))])
    rng = np.random.default_rng(1)
    old = np.resize(_weights(rng, count // 16), count)
    # One after the other: models are larger than caches, and no branch comes as it came before.
    places = [(old.copy(), old.view(np.uint8).copy()) for _ in range(6 if is_compiled else 1)]
    samples = [[_changed(rng, old, share) for _ in places] for share in _SHARES]
    decode: dict[Profile, DecodeRate] = {}
    encode: dict[Profile, float] = {}
    for profile in Profile:
        made = [[_encoded(layout, old, new, profile) for new in news] for news in samples]
        encode_s = _least_s(lambda p=profile: _encoded(layout, old, samples[0][0], p))
        encode[profile] = old.nbytes / encode_s
        few, many = (_decoding_s(patches, places) for patches in made)
        nbytes = [sum(len(each.payload) for each in patches[0].chunks) for patches in made]
        per_byte_s = max((many - few) / (nbytes[1] - nbytes[0]), 1 / _FASTEST)
        passing_s = max(few - nbytes[0] * per_byte_s, old.nbytes / _FASTEST)
        decode[profile] = DecodeRate(
            profile=profile,
            model_bytes_per_s=old.nbytes / passing_s,
            payload_bytes_per_s=1 / per_byte_s,
            # For numpy all of a range: it takes as long for the lanes of a large range as for few.
            whole_bytes_per_s=_whole_rate(
                old[: count // 2] if is_compiled else np.resize(old, 4 * count), profile
            ),
        )
    return CodecRates(decode=decode, encode_bytes_per_s=encode)


def _weights(rng: np.random.Generator, count: int) -> np.ndarray:
    values = rng.standard_normal(count, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _changed(rng: np.random.Generator, old: np.ndarray, share: float) -> np.ndarray:
    """Move about a share of the elements, as a step of an optimizer does.

    The finer a value the likelier it changes, and nine of ten changes are by a unit.
    """
    tried = rng.integers(0, len(old), int(5 * share * len(old)))
    fineness = 117.0 - (old[tried] >> 7 & 0xFF)
    places = tried[rng.random(len(tried)) < np.exp2(fineness)]
    steps = np.array([1, -1, 1, -1, 1, -1, 1, -1, 1, -2]).astype(old.dtype)
    new = old.copy()
    new[places] += rng.choice(steps, len(places))
    return new


def _encoded(layout: Layout, old: np.ndarray, new: np.ndarray, profile: Profile) -> EncodedPatch:
    target, base = (flat_bits(each.view(np.uint8)) for each in (new, old))
    return encode_patch(Runs(layout), target, base, StateDigest(), profile=profile)


def _decoding_s(
    patches: Sequence[EncodedPatch], places: Sequence[tuple[np.ndarray, np.ndarray]]
) -> float:
    turns = cycle(zip(patches, places, strict=True))

    def decode() -> None:
        patch, place = next(turns)
        _decode(patch, *place)

    # What is made once for a patch and kept, such as the slots of its tables, is no part of it.
    for _ in patches:
        decode()
    return _least_s(decode)


def _decode(patch: EncodedPatch, old: np.ndarray, state: np.ndarray) -> None:
    (chunk,) = patch.chunks
    blake3(chunk.payload).digest()
    change = decode_change(chunk, old, patch.shared_tables)
    if change is None:
        raise AssertionError("the sample was made with changes")
    StateDigest().after(change)
    change.apply(state)


def _whole_rate(bits: np.ndarray, profile: Profile) -> float:
    layout, flat = Layout.of([("w", Dtype.BF16, bits.shape)]), bits.copy().view(np.uint8)
    (chunk,) = encode_whole(Runs(layout), flat_bits(flat), profile=profile)

    def decode() -> None:
        flat.view(np.uint16)[:] = decode_whole(chunk)
        StateDigest.of(layout, flat)

    return bits.nbytes / _least_s(decode)


def cpu_s_of(work: Callable[[], object]) -> float:
    """Return the seconds of CPU that this thread has for something; more than 0.

    Where the clock of a thread stands still for as long, it is the seconds that pass: gVisor's
    moves on each 10 ms.
    """
    began, cpu_began = perf_counter(), thread_time()
    work()
    return (thread_time() - cpu_began) or (perf_counter() - began)


def _least_s(work: Callable[[], object]) -> float:
    """Return the least CPU time of some runs, or of one that takes long enough."""
    work()
    least, spent = float("inf"), 0.0
    for _ in range(_REPEATS):
        least = min(least, cpu_s_of(work))
        spent += least
        if spent > _ENOUGH_S:
            break
    return least
