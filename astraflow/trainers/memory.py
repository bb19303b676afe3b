"""How much of a device's memory a step takes, by arithmetic, and what of one there is."""

import os
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Final, Self

import torch

from astraflow.config.policies import Fsdp

_F32 = 4

# Of what is ours: the allocator's gaps, the runtime, and what a step's arithmetic leaves out.
_USABLE: Final = 0.75
_FRACTION: Final = re.compile(r"per_process_memory_fraction:([0-9.]+)")


def usable_nbytes(device: torch.device) -> int:
    """Return how much of a GPU's memory a step may count on: of our part, or of what is free."""
    free, total = torch.cuda.mem_get_info(device)
    said = _FRACTION.search(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    ours = float(said[1]) * total if said else total
    held = torch.cuda.memory_reserved(device)
    return int(_USABLE * min(ours, free + held))


# Of the logits of one tile, f32: the tile, a strip as large, and a product; `fused_head.Tiling`.
_HEAD_NBYTES = 3 * 4096 * 8192 * _F32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a dense decoder its memory depends on.

    Attributes:
        intermediate: Width of the gated feed-forward layer.
        heads: Numbers of all query heads of a token.
        kv_heads: Numbers of all key heads of a token.
        is_tied: Whether the output layer is the embeddings.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read it from a `config.json`.

        Raises:
            KeyError: A name that decoders have is not there.
        """
        count = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // count
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=count * size,
            kv_heads=(config.get("num_key_value_heads") or count) * size,
            vocabulary=config["vocab_size"],
            is_tied=config.get("tie_word_embeddings", False),
        )

    @property
    def block_parameters(self) -> int:
        """Weights of a block; its norms are left out."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def outer_parameters(self) -> int:
        """Weights of embeddings and output layer."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.outer_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes on one rank when a step takes most.

    Attributes:
        weights: Masters, f32.
        gradients: f32.
        moments: Two of AdamW, f32.
        gathered: Of other ranks' weights, and gradients before they are shared out.
        inputs: Of blocks, which wait for their gradient; without recomputation all that a block
            computes on the way.
        block: What one block computes on the way, its weights in bf16, and gradients of both.
        head: Hidden states before the output layer, tiles of logits, and the gradient of the
            embeddings before it is added to the others.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int
    inputs: int
    block: int
    head: int

    @classmethod
    def of(cls, shape: ModelShape, fsdp: Fsdp, *, tokens: int, ranks: int = 1) -> Self:
        """Add up.

        Args:
            shape: Of the model.
            fsdp: As `blocks.resolved` returns it for the device.
            tokens: Of one pass, on this rank; with context parallelism of its parts of rows.
            ranks: That share the model.

        Example:
            >>> qwen3 = ModelShape(
            ...     layers=28, hidden=2048, intermediate=6144, heads=2048, kv_heads=1024,
            ...     vocabulary=151_936, is_tied=True,
            ... )  # fmt: skip
            >>> settings = Fsdp(compute="bf16", checkpointing=True)
            >>> round(StepMemory.of(qwen3, settings, tokens=8192).total / 2**30)
            29
        """
        size = _F32 if fsdp.compute == "f32" else 2
        own = -(-shape.parameters // ranks)
        computed = tokens * _kept_nbytes(shape, size, fsdp.tensor_parallel)
        waiting = tokens * size * shape.hidden if fsdp.checkpointing else computed
        is_cast = size != _F32
        is_shared = ranks > 1
        block = shape.block_parameters // fsdp.tensor_parallel
        # Weights of two blocks, the next one early, and the gradient of one in both types.
        blocks = block * (2 * size + size + _F32)
        outer = shape.outer_parameters * 2 * _F32
        return cls(
            weights=own * _F32,
            gradients=own * _F32,
            moments=own * 2 * _F32,
            gathered=blocks + outer if is_shared else 0,
            inputs=shape.layers * waiting,
            block=computed // (1 if fsdp.checkpointing else 2)
            + (2 * block * size if is_cast and not is_shared else 0),
            head=(3 * tokens + shape.vocabulary) * shape.hidden * _F32 + _HEAD_NBYTES,
        )

    @classmethod
    def tokens_that_fit(cls, shape: ModelShape, fsdp: Fsdp, nbytes: int) -> int:
        """Return of how many tokens a pass on one rank may be in so many bytes; 0: of none.

        Example:
            >>> qwen3 = ModelShape(
            ...     layers=28, hidden=2048, intermediate=6144, heads=2048, kv_heads=1024,
            ...     vocabulary=151_936, is_tied=True,
            ... )  # fmt: skip
            >>> settings = Fsdp(compute="bf16", checkpointing=False)
            >>> StepMemory.tokens_that_fit(qwen3, settings, 60 << 30) // 1024
            10
        """
        many = 1 << 20
        none = cls.of(shape, fsdp, tokens=0).total
        each = (cls.of(shape, fsdp, tokens=many).total - none) / many
        return max(0, int((nbytes - none) / each))

    @property
    def total(self) -> int:
        """All of it; parts that are not there at once are added all the same."""
        return sum(astuple(self))


def _kept_nbytes(shape: ModelShape, size: int, parts: int) -> int:
    """Return what a block keeps of each token for its gradient, computing in numbers of a size.

    Two norms keep their input, what is normalised and what they say, attention its queries, keys,
    values (norms of these take as much again) and what comes of them, the feed-forward layer its
    gate, before and after the activation, the other branch and their product. Norms compute in f32.
    Of heads and of the feed-forward width there may be parts on several ranks.
    """
    attention = 3 * shape.heads + 3 * shape.kv_heads
    numbers = 6 * shape.hidden + (attention + 4 * shape.intermediate) // parts
    in_f32 = 0 if size == _F32 else 2 * shape.hidden * _F32
    return numbers * size + in_f32
