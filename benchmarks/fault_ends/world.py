"""A training of small tensors of many dtypes, and what its versions truly are."""

from dataclasses import replace
from typing import Final

import numpy as np

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import SourceInfo, SourceKind, SourceState, VersionInfo
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import TransferServer

POLICY: Final = PolicyId("faults")
TOKEN: Final = b"faults"
KEPT: Final = 16

# Neighbours have different dtypes: every tensor is a run, and so a chunk, of its own.
_SHAPES: Final = (
    (Dtype.BF16, (48, 16), True),
    (Dtype.F32, (80,), True),
    (Dtype.BF16, (16, 8), True),
    (Dtype.F8_E4M3, (300,), True),
    (Dtype.I64, (16,), True),
    (Dtype.BF16, (), False),
    (Dtype.F32, (0, 4), False),
    (Dtype.F16, (100,), True),
    (Dtype.U8, (201,), True),
    (Dtype.BF16, (300,), True),
    (Dtype.I32, (33,), False),
)


def make_layout(scale: int) -> Layout:
    """Return the layout; all but its smallest tensors grow with `scale` (1: 4 KB)."""
    return Layout.of(
        (
            f"t{number:02d}",
            dtype,
            (shape[0] * scale, *shape[1:]) if grows else shape,
        )
        for number, (dtype, shape, grows) in enumerate(_SHAPES)
    )


class World:
    """Publishes one version after the other and remembers what each one truly is.

    The truth is kept apart from the publisher: u8[nbytes] by version, of the last versions. The
    same seed makes the same versions, in every process.

    Attributes:
        infos: Of the last versions, by number.
        truths: Their flat states, by number.
    """

    def __init__(self, *, seed: int, scale: int, endpoints: tuple[str, ...] = ()) -> None:
        self.layout = make_layout(scale)
        self.publisher = WeightPublisher(POLICY, self.layout, keep_patches=KEPT)
        self.servicer = TransferServer({POLICY: self.publisher.store})
        self.servicer.set_transfer_token(TOKEN)
        self.endpoints = endpoints
        self.infos: dict[int, VersionInfo] = {}
        self.truths: dict[int, np.ndarray] = {}
        self._rng = np.random.default_rng(seed)
        self._flat = np.zeros(self.layout.nbytes, np.uint8)
        for spec in self.layout.tensors:
            view = self._bits(spec.name)
            view[:] = self._noise(view)

    @property
    def version(self) -> int:
        """The newest one; -1: none yet."""
        return max(self.infos, default=-1)

    def publish(self) -> VersionInfo:
        """Move the weights and publish them."""
        version = self.version + 1
        if version:
            self._move()
        tensors = {
            spec.name: self.layout.view(self._flat, spec.name) for spec in self.layout.tensors
        }
        info = self.publisher.publish(version, tensors, step=version)
        self.infos[version] = replace(info, sources=sources(self.endpoints))
        self.truths[version] = self._flat.copy()
        for old in [each for each in self.infos if each < version - KEPT]:
            del self.infos[old], self.truths[old]
        return self.infos[version]

    def _move(self) -> None:
        """Change a little of most tensors, nothing of some, all of a small one now and then."""
        for spec in self.layout.tensors:
            bits, chance = self._bits(spec.name), self._rng.random()
            if not len(bits) or chance < 0.15:
                continue
            if chance > 0.97 and spec.nbytes < self.layout.nbytes / 8:
                bits[:] = self._noise(bits)
                continue
            share = self._rng.choice([0.002, 0.01, 0.05])
            at = self._rng.integers(0, len(bits), max(1, int(share * len(bits))))
            if chance > 0.8:
                bits[at] = self._noise(bits[at])
            else:
                bits[at] += self._rng.choice([1, -1, 3], len(at)).astype(bits.dtype)

    def _bits(self, name: str) -> np.ndarray:
        return self.layout.view(self._flat, name).reshape(-1)

    def _noise(self, bits: np.ndarray) -> np.ndarray:
        return np.frombuffer(self._rng.bytes(bits.nbytes), bits.dtype)


def sources(
    endpoints: tuple[str, ...], kind: SourceKind = SourceKind.ORIGIN
) -> tuple[SourceInfo, ...]:
    """Return sources that have a version whole, best first."""
    return tuple(SourceInfo(kind=kind, state=SourceState.LIVE, endpoint=each) for each in endpoints)
