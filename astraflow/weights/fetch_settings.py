"""FetchSettings: how sources are asked."""

from dataclasses import dataclass, field
from typing import Final

from astraflow.core.versions import SourceKind
from astraflow.weights.signs import Patience

# A second source is worth its round trip from here on.
_SHARED_NBYTES: Final = 8 << 20
_ORIGIN_PATIENCE: Final = Patience(silent_s=5.0, first_s=5.0)
# An object store sends nothing until it has read a large block; its lane notices when it hangs.
_STORE_PATIENCE: Final = Patience(silent_s=60.0, first_s=60.0, idle_s=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """How long is waited, and for whom.

    Attributes:
        patience: With a relay, if there is another source; else it is only said that it stalls.
        origin_patience: The same of origins, which give no signs while they make a chunk again.
        shared_nbytes: Payload from which on several sources are asked at once.
        avoided_s: A source from which nothing came comes after the others for so long.
    """

    patience: Patience = field(default_factory=Patience)
    origin_patience: Patience = field(default_factory=lambda: _ORIGIN_PATIENCE)
    shared_nbytes: int = _SHARED_NBYTES
    avoided_s: float = 60.0

    def patience_with(self, kind: SourceKind) -> Patience:
        """Return how long sources of a kind may be silent."""
        known = {SourceKind.RELAY: self.patience, SourceKind.ORIGIN: self.origin_patience}
        return known.get(kind, _STORE_PATIENCE)
