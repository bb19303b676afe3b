"""Real versions of weights: a small transformer, trained on this project's text, then by reward.

    python benchmarks/corpus.py --rate 1e-6 --out versions.npz

A decoder of about 11 M parameters reads bytes. 260 steps of pretraining on the project's own text
make its weights ordinary ones. Policy-gradient steps follow: pieces of the text are scored, the
advantage is the score against the mean of the batch, and Adam (.9, .999) moves fp32 masters, or
what `--optimizer` says. A version is the master weights, rounded to bf16, after one step.

Everything is seeded; `--width`, `--depth` and the counts make it smaller. Muon needs torch 2.9.
"""

import argparse
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

REPOSITORY = Path(__file__).parent.parent
VOCABULARY = 256
HEAD_WIDTH = 64

Version = Mapping[str, np.ndarray]
"""Bits of each tensor by name: u16 in its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the model and of what it is trained on.

    Attributes:
        width: Of the residual stream.
        depth: Blocks.
        context: Bytes in a sequence.
        batch: Sequences in a step.
        pretraining_steps: Before the first version.
        warm_up_steps: By reward, before the first version: Adam is in its stationary state then.
    """

    width: int = 384
    depth: int = 6
    context: int = 128
    batch: int = 8
    pretraining_steps: int = 260
    warm_up_steps: int = 20


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on top of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block: f32[batch, length, width]."""
        batch, length, width = x.shape
        heads = (batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = self.qkv(self.norm_in(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm_out(x))))


class Decoder(nn.Module):
    """Bytes in, logits of the next bytes out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return f32[batch, length, 256] for i64[batch, length]."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def project_text() -> Tensor:
    """Return the project's documents and code as bytes: i64[n]."""
    paths = sorted({*REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("astraflow/**/*.py")})
    text = b"\n".join(path.read_bytes() for path in paths)
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))


def pretrained(size: Size, seed: int) -> Decoder:
    """Return the model after its pretraining."""
    torch.manual_seed(seed)
    model, text = Decoder(size), project_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for step in range(size.pretraining_steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
        loss = -log_likelihoods(model, sequences(text, size)).mean()
        update(model, [optimizer], loss)
    return model


def adam(model: nn.Module, rate: float) -> Sequence[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)]


def sgd(model: nn.Module, rate: float) -> Sequence[Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)]


def muon(model: nn.Module, rate: float) -> Sequence[Optimizer]:
    """Matrices of blocks move by Muon, everything else by Adam at the same rate."""
    blocks = [each for name, each in model.named_parameters() if is_of_blocks(name, each)]
    rest = [each for name, each in model.named_parameters() if not is_of_blocks(name, each)]
    return [
        torch.optim.Muon(blocks, lr=rate, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=rate, weight_decay=0.0),
    ]


def is_of_blocks(name: str, value: Tensor) -> bool:
    return name.startswith("blocks.") and value.ndim == 2


OPTIMIZERS = {"adam": adam, "sgd": sgd, "muon": muon}


def versions(
    model: Decoder, size: Size, *, rate: float, count: int, seed: int, optimizer: str = "adam"
) -> Iterator[Version]:
    """Yield versions of a copy of the model that is trained by reward.

    Args:
        model: Where training begins.
        size: Of its steps.
        rate: Of learning.
        count: Versions; every step makes one.
        seed: Of the prompts.
        optimizer: One of `OPTIMIZERS`.
    """
    torch.manual_seed(seed)
    model, text = copy.deepcopy(model), project_text()
    optimizers = OPTIMIZERS[optimizer](model, rate)
    for step in range(size.warm_up_steps + count - 1):
        if step >= size.warm_up_steps - 1:
            yield exported(model)
        tokens = sequences(text, size)
        advantages = scores(tokens)
        loss = -(advantages[:, None] * log_likelihoods(model, tokens)).mean()
        update(model, optimizers, loss)
    yield exported(model)


def sequences(text: Tensor, size: Size) -> Tensor:
    """Return pieces of the text: i64[batch, context]."""
    starts = torch.randint(0, len(text) - size.context, (size.batch,))
    return torch.stack([text[start : start + size.context] for start in starts.tolist()])


def log_likelihoods(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return f32[batch, context - 1]: of each byte after the first."""
    logits = model(tokens[:, :-1])
    return -functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1), reduction="none"
    ).view(tokens.shape[0], -1)


def scores(tokens: Tensor) -> Tensor:
    """Return advantages, f32[batch]: how many letters e a piece has, against the others."""
    counts = (tokens == ord("e")).float().sum(1)
    return (counts - counts.mean()) / (counts.std() + 1e-6)


def update(model: nn.Module, optimizers: Iterable[Optimizer], loss: Tensor) -> None:
    """Take one step."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for each in optimizers:
        each.step()


def exported(model: nn.Module) -> Version:
    """Return the weights, rounded to bf16: u16 by name."""
    return {
        name: value.detach().bfloat16().view(torch.int16).numpy().view(np.uint16).copy()
        for name, value in model.named_parameters()
    }


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add what makes the corpus smaller to a command line."""
    defaults = Size()
    for name in Size.__slots__:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(defaults, name))


def size_of(given: argparse.Namespace) -> Size:
    """Return what a command line asked for."""
    return Size(**{name: getattr(given, name) for name in Size.__slots__})


def main() -> None:
    """Write versions into one file: arrays named version/tensor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    add_size(parser)
    given = parser.parse_args()
    size = size_of(given)
    model = pretrained(size, given.seed)
    made = versions(
        model,
        size,
        rate=given.rate,
        count=given.count,
        seed=given.seed,
        optimizer=given.optimizer,
    )
    arrays = {f"{n}/{name}": bits for n, each in enumerate(made) for name, bits in each.items()}
    np.savez(given.out, **arrays)


if __name__ == "__main__":
    main()
