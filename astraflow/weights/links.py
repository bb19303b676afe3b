"""Links: what the bytes and the decoding of a patch cost a reader, in time."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from astraflow.core.versions import CodecProfile, PatchInfo

PROFILES: Final = (CodecProfile.FAST, CodecProfile.COMPACT)
"""What is coded and decoded by this release."""

# What coding a second patch costs however small it is, and what measured goodputs are off by.
_LEAST_S: Final = 0.01

APPLIED_PER_S: Final = {CodecProfile.FAST: 10e9, CodecProfile.COMPACT: 4.6e9}
"""Bytes of the model per second of one core: decoding, verifying and applying a patch.

Measured by benchmarks/codec.py at 1 % changed, on a machine that did other work as well.
"""

# The same from nothing: raw bytes are copied, planes are put together again, all is digested.
_FILLED_PER_S: Final = {CodecProfile.FAST: 1e9, CodecProfile.COMPACT: 0.75e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """What it costs to code a patch compactly after it was coded fast.

    Attributes:
        share: Bytes for one of the fast patch; at 1 % changed 0.87 to 1.36.
        encoded_per_s: Bytes of the model.
    """

    share: float = 0.65
    encoded_per_s: float = 3e9

    def seconds(self, model_nbytes: int) -> float:
        """Return how long readers wait for it."""
        return model_nbytes / self.encoded_per_s + _LEAST_S

    def is_worth(self, links: Iterable["Link"], nbytes: int, model_nbytes: int) -> bool:
        """Whether readers with known links, together, have a new version sooner.

        Args:
            links: What they told.
            nbytes: Of the fast patch.
            model_nbytes: Of what is coded.
        """
        known = (each for each in links if each.goodput_bytes_per_s > 0)
        return sum(each.gained_s(nbytes, model_nbytes, self) for each in known) > 0


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

    def gained_s(self, nbytes: int, model_nbytes: int, compact: "Compact") -> float:
        """Return how much sooner the reader is done if it waits for a compact patch.

        Args:
            nbytes: Of the fast patch, which there is.
            model_nbytes: Of what is coded.
            compact: What coding it costs.
        """
        saved = nbytes * (1 - compact.share) / self.goodput_bytes_per_s
        slower = 1 / APPLIED_PER_S[CodecProfile.COMPACT] - 1 / APPLIED_PER_S[CodecProfile.FAST]
        decoding = model_nbytes * slower / max(self.core_count, 1)
        return saved - decoding - compact.seconds(model_nbytes)

    def cost(self, info: PatchInfo, nbytes: int, model_nbytes: int) -> float:
        """Return what a patch costs: seconds, or bytes where the goodput is unknown.

        At 1 % changed the profiles cost the same at about 12 MB/s for each core.

        Args:
            info: Names the patch.
            nbytes: Of it that are to be sent.
            model_nbytes: Of what is decoded.
        """
        if self.goodput_bytes_per_s <= 0:
            return nbytes
        rates = _FILLED_PER_S if info.base_version is None else APPLIED_PER_S
        decoding = model_nbytes / rates[info.profile] / max(self.core_count, 1)
        return nbytes / self.goodput_bytes_per_s + decoding
