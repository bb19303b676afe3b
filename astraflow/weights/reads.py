"""Reads: what reads the tensors of each version; of a model's parameters it stays the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import TensorSpec
from astraflow.weights.arrays import Place, ReadBits, place_of, reader_of
from astraflow.weights.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What reads a parameter.

    Attributes:
        parameter: It.
        place: Where it lay when this was made.
        read: Reads it there.
    """

    parameter: Any
    place: Place
    read: ReadBits


class Reads:
    """Makes what reads tensors, once for a parameter that lies where it lay before."""

    def __init__(self, part: Part) -> None:
        """Begin without any.

        Args:
            part: What of the layout is read.
        """
        self._part = part
        self._kept: dict[str, _Kept] = {}

    def of(self, tensors: Mapping[str, Any]) -> dict[str, ReadBits]:
        """Check names, shapes and types; nothing is read yet.

        Args:
            tensors: Every tensor of the layout, by name; see `reader_of`.

        Raises:
            AstraflowError: LAYOUT_MISMATCH naming the tensor.
        """
        by_name = self._part.layout.by_name
        if tensors.keys() != by_name.keys():
            names = sorted(tensors.keys() ^ by_name.keys())
            raise AstraflowError(
                Reason.LAYOUT_MISMATCH, f"tensors and layout differ in {', '.join(names[:5])}"
            )
        return {name: self._reader(tensors[name], spec) for name, spec in by_name.items()}

    def _reader(self, tensor: Any, spec: TensorSpec) -> ReadBits:
        place, kept = place_of(tensor), self._kept.pop(spec.name, None)
        if place is None:
            return reader_of(tensor, spec, self._part.shard)
        if kept is None or kept.parameter is not tensor or kept.place != place:
            read = reader_of(tensor, spec, self._part.shard)
            kept = _Kept(parameter=tensor, place=place, read=read)
        self._kept[spec.name] = kept
        return kept.read
