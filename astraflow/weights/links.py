"""Links: what the bytes and the decoding of a patch cost a reader, in time."""

from dataclasses import dataclass
from typing import Final

from astraflow.core.versions import CodecProfile, PatchInfo

PROFILES: Final = (CodecProfile.FAST, CodecProfile.COMPACT)
"""What is coded and decoded by this release."""

# Bytes of a compact patch for one of the fast one, at 1 % changed: 0.87 to 1.36.
_COMPACT_SHARE: Final = 0.65
_COMPACT_ENCODED_PER_S: Final = 2.5e9
# What coding a second patch costs however small it is, and what measured goodputs are off by.
_WORTH_S: Final = 0.01

# Bytes of the model per second of one core: decoding, verifying and applying a patch.
_APPLIED_PER_S: Final = {CodecProfile.FAST: 10e9, CodecProfile.COMPACT: 3.5e9}
# The same from nothing: raw bytes are copied, planes are put together again.
_FILLED_PER_S: Final = {CodecProfile.FAST: 5e9, CodecProfile.COMPACT: 1e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a reader told of itself.

    Attributes:
        profiles: It takes these, in order of preference; empty: what costs it the least time.
        goodput_bytes_per_s: Measured; 0: unknown, and then bytes alone count.
        core_count: Cores that it decodes on; 0: unknown, and then it is one.
    """

    profiles: tuple[CodecProfile, ...] = ()
    goodput_bytes_per_s: float = 0.0
    core_count: int = 0

    def choices(self) -> tuple[frozenset[CodecProfile], ...]:
        """Return which profiles may be used: the first set with which there is a way is."""
        if not self.profiles:
            return (frozenset(CodecProfile),)
        counts = range(1, len(self.profiles) + 1)
        return tuple(frozenset(self.profiles[:count]) for count in counts)

    def is_slow_for(self, nbytes: int, model_nbytes: int) -> bool:
        """Whether waiting for a compact patch to be coded takes less time than a fast one's bytes.

        Args:
            nbytes: Of the fast patch.
            model_nbytes: Of what is coded.
        """
        if self.goodput_bytes_per_s <= 0:
            return False
        saved = nbytes * (1 - _COMPACT_SHARE) / self.goodput_bytes_per_s
        slower = 1 / _APPLIED_PER_S[CodecProfile.COMPACT] - 1 / _APPLIED_PER_S[CodecProfile.FAST]
        decoding = model_nbytes * slower / max(self.core_count, 1)
        return saved > decoding + model_nbytes / _COMPACT_ENCODED_PER_S + _WORTH_S

    def cost(self, info: PatchInfo, nbytes: int, model_nbytes: int) -> float:
        """Return what a patch costs: seconds, or bytes where the goodput is unknown.

        At 1 % changed the profiles cost the same at about 13 MB/s for each core.

        Args:
            info: Names the patch.
            nbytes: Of it that are to be sent.
            model_nbytes: Of what is decoded.
        """
        if self.goodput_bytes_per_s <= 0:
            return nbytes
        rates = _FILLED_PER_S if info.base_version is None else _APPLIED_PER_S
        decoding = model_nbytes / rates[info.profile] / max(self.core_count, 1)
        return nbytes / self.goodput_bytes_per_s + decoding
