"""What has crossed a link."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What one direction has carried since the link stands.

    Attributes:
        packets: That entered the line; lost ones are not among them.
        nbytes: Of these, with IP headers.
        dropped: Packets that were lost, or found the queue full.
    """

    packets: int
    nbytes: int
    dropped: int

    def since(self, earlier: "Flow") -> "Flow":
        """Return what came after an earlier count."""
        return Flow(
            packets=self.packets - earlier.packets,
            nbytes=self.nbytes - earlier.nbytes,
            dropped=self.dropped - earlier.dropped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Both directions."""

    to_far: Flow
    to_near: Flow

    def since(self, earlier: "Counts") -> "Counts":
        """Return what came after an earlier count."""
        return Counts(
            to_far=self.to_far.since(earlier.to_far), to_near=self.to_near.since(earlier.to_near)
        )
