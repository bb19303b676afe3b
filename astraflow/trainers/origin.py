"""The origin of a policy's weights: every version is exported, encoded, served and announced."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from torch import nn

from astraflow.core.dtype import Dtype
from astraflow.core.versions import VersionInfo
from astraflow.trainers.export import export_bits


class Followers(Protocol):
    """What goes on beside training once a version was announced."""

    def wake(self) -> None:
        """Say that there is a newer version; return at once."""
        ...


class Publisher(Protocol):
    """Encodes versions and holds them to be pulled."""

    def publish(self, version: int, tensors: Mapping[str, np.ndarray], *, step: int) -> VersionInfo:
        """Make a version ready to be pulled."""
        ...


class Herald(Protocol):
    """Tells the run of versions."""

    def publish_version(self, info: VersionInfo) -> int:
        """Announce a version; return the number of the next one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Publication:
    """One version as it was published.

    Attributes:
        info: What the run was told.
        bits: Of every tensor.
        publish_s: Seconds to export, encode and announce it.
    """

    info: VersionInfo
    bits: Mapping[str, np.ndarray]
    publish_s: float

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers for the log: what a reader of the version before pulls, of what all takes."""
        sizes = [patch.payload_nbytes for patch in self.info.patches]
        whole = sum(bits.nbytes for bits in self.bits.values())
        return {
            "weights/version": float(self.info.version),
            "weights/bytes": float(min(sizes, default=0)),
            "weights/density": min(sizes, default=0) / max(1, whole),
            "time/publish_s": self.publish_s,
        }


class WeightOrigin:
    """Publishes the weights of a model, one version after the other."""

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: Dtype,
        publisher: Publisher,
        herald: Herald,
        first_version: int,
        followers: Followers | None = None,
    ) -> None:
        self._module = module
        self._dtype = dtype
        self._publisher = publisher
        self._herald = herald
        self._next_version = first_version
        self._followers = followers

    def publish(self, *, step: int) -> Publication:
        """Make the present weights the next version.

        Raises:
            AstraflowError: What the publisher and the run answer, such as VERSION_NOT_NEXT.
        """
        started = perf_counter()
        bits = export_bits(self._module, self._dtype)
        info = self._publisher.publish(self._next_version, bits, step=step)
        self._next_version = self._herald.publish_version(info)
        if self._followers is not None:
            self._followers.wake()
        return Publication(info=info, bits=bits, publish_s=perf_counter() - started)
