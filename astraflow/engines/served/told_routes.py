"""What servers tell of experts: bytes in base64, made into routes of a generation."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import UNROUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
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
            raise _failed(f"its experts go from {rows.min()} to {rows.max()}")
        routes = np.full((token_count, *rows.shape[1:]), UNROUTED, np.uint16)
        routes[: len(rows)] = rows
        return routes

    def _rows(self, told: np.ndarray) -> np.ndarray:
        """Return [tokens, sparse layers, k]."""
        if told.ndim == 1:
            whole = self.layer_count * self.chosen_count
            if told.size % whole:
                raise _failed(f"{told.size} experts are no multiple of {whole}")
            told = told.reshape(-1, self.layer_count, self.chosen_count)
        if told.shape[1:] == (self.layer_count, self.chosen_count):
            return told[:, list(self.sparse_layers)]
        if told.shape[1:] != (len(self.sparse_layers), self.chosen_count):
            raise _failed(f"its experts have shape {told.shape}")
        return told


def from_npy(text: str | None) -> np.ndarray | None:
    """Read what is a file of numpy in base64."""
    if not text:
        return None
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def from_i32(text: str | None) -> np.ndarray | None:
    """Read what are integers of four bytes in base64, one behind the other."""
    return np.frombuffer(base64.b64decode(text), "<i4") if text else None


def _failed(what: str) -> AstraflowError:
    return AstraflowError(
        Reason.ENGINE_FAILED, f"the server tells of experts of another model: {what}"
    )
