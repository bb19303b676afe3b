"""Mixtures of experts in servers: their tensors, and the experts that tokens were routed to."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import UNROUTED
from astraflow.core.tensors import TensorSpec, TensorUpdate, WeightUpdate

Shapes = Mapping[str, tuple[int, ...]]

# What the stacked tensors hold of each expert, one behind the other.
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_experts(update: WeightUpdate, shapes: Shapes) -> WeightUpdate:
    """Return an update with the tensors of a checkpoint: what is stacked in it is cut apart.

    A server's loader knows the names of the checkpoint. An expert's share of a stack is one
    stretch, so nothing is copied but the indices of what changed.

    Args:
        update: With `...experts.gate_up_proj`, [E, 2 I, H], and `...experts.down_proj`, [E, H, I],
            as transformers has them.
        shapes: Of the checkpoint; what it has no names for stays as it is.
    """
    pieces = [piece for part in update.tensors for piece in _split_stack(part, shapes)]
    return replace(update, tensors=tuple(pieces))


def _split_stack(part: TensorUpdate, shapes: Shapes) -> Iterator[TensorUpdate]:
    names = _stacked_names(part.spec, shapes)
    if not names:
        yield part
        return
    width = part.spec.element_count // len(names)
    starts = np.arange(len(names) + 1) * width
    bounds = starts if part.indices is None else np.searchsorted(part.indices, starts)
    for name, start, first, last in zip(names, starts, bounds, bounds[1:], strict=False):
        if first == last:
            continue
        yield TensorUpdate(
            spec=TensorSpec(name=name, dtype=part.spec.dtype, shape=shapes[name], offset=0),
            indices=None if part.indices is None else part.indices[first:last] - start,
            values=part.values[first:last],
        )


def _stacked_names(spec: TensorSpec, shapes: Shapes) -> Sequence[str]:
    """Return the names of what a stack holds, in its order; none: it is no stack here."""
    prefix, _, stack = spec.name.rpartition(".experts.")
    if not prefix or spec.name in shapes or stack not in _STACKS:
        return ()
    names = [
        f"{prefix}.experts.{expert}.{each}.weight"
        for expert in range(spec.shape[0])
        for each in _STACKS[stack]
    ]
    return names if all(name in shapes for name in names) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """How a model chooses experts.

    Attributes:
        layer_count: Of all layers.
        sparse_layers: Those that have experts.
        chosen_count: Experts that a token takes in one of them.
    """

    layer_count: int
    sparse_layers: tuple[int, ...]
    chosen_count: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self | None:
        """Read a config of transformers; None: the model is dense."""
        if not fields.get("num_experts_per_tok"):
            return None
        count: int = fields["num_hidden_layers"]
        dense: set[int] = set(fields.get("mlp_only_layers") or ())
        dense |= set(range(fields.get("first_k_dense_replace") or 0))
        kinds: Sequence[str] = fields.get("mlp_layer_types") or ()
        dense |= {layer for layer, kind in enumerate(kinds) if kind == "dense"}
        step: int = fields.get("decoder_sparse_step") or 1
        sparse = (layer for layer in range(count) if (layer + 1) % step == 0)
        return cls(
            layer_count=count,
            sparse_layers=tuple(layer for layer in sparse if layer not in dense),
            chosen_count=fields["num_experts_per_tok"],
        )

    def routes(self, told: np.ndarray, token_count: int) -> np.ndarray:
        """Return the routes of all tokens of a generation.

        Args:
            told: Integers, of the first tokens, layer by layer; of all layers or of the sparse
                ones. A server may tell of tokens behind the last one that counts.
            token_count: Of prompt and completion.

        Returns:
            u16[token_count, layers, k], UNROUTED where nothing is told.

        Raises:
            AstraflowError: ENGINE_FAILED for numbers that are not of this model.
        """
        rows = self._rows(told)[: token_count - 1]
        if len(rows) and not 0 <= rows.min() <= rows.max() < UNROUTED:
            raise _foreign_experts(f"its experts go from {rows.min()} to {rows.max()}")
        routes = np.full((token_count, *rows.shape[1:]), UNROUTED, np.uint16)
        routes[: len(rows)] = rows
        return routes

    def _rows(self, told: np.ndarray) -> np.ndarray:
        """Return [tokens, sparse layers, k]."""
        if told.ndim == 1:
            whole = self.layer_count * self.chosen_count
            if told.size % whole:
                raise _foreign_experts(f"{told.size} experts are no multiple of {whole}")
            told = told.reshape(-1, self.layer_count, self.chosen_count)
        if told.shape[1:] == (self.layer_count, self.chosen_count):
            return told[:, list(self.sparse_layers)]
        if told.shape[1:] != (len(self.sparse_layers), self.chosen_count):
            raise _foreign_experts(f"its experts have shape {told.shape}")
        return told


def from_npy(text: str | None) -> np.ndarray | None:
    """Read what is a file of numpy in base64."""
    if not text:
        return None
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def from_i32(text: str | None) -> np.ndarray | None:
    """Read what are integers of four bytes in base64, one behind the other."""
    return np.frombuffer(base64.b64decode(text), "<i4") if text else None


def _foreign_experts(what: str) -> AstraflowError:
    return AstraflowError(
        Reason.ENGINE_FAILED, f"the server tells of experts of another model: {what}"
    )
