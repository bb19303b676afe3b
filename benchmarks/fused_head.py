"""The loss from hidden states, tile by tile, against a cross-entropy on all logits.

    python benchmarks/fused_head.py --json fused_head.json
    python benchmarks/fused_head.py --shapes 1024x2048x131072 2048x512x32768 --threads 1 2

Each run is a process of its own: log-probabilities of T tokens from hidden states of width H and a
vocabulary of V, forward and backward, in f32. Plain is `F.cross_entropy(F.linear(...))`. Extra
memory is the most that was resident, less what stands: what was resident before, with the hidden
states and the weight, and their gradients. `--passes 2` adds a second pass to the gradients of the
first, as micro-batches do. At the default size plain takes 15 GB.

Time is told twice, of the processor and by the clock. Threads that wait for one another spin, which
counts as processor time: much where other programs keep the cores busy. `OMP_WAIT_POLICY=passive`
leaves it out for both.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from astraflow.trainers.fused_head import Head, Tiling, fused_logprobs
from astraflow.trainers.tensors import backward, seed_everything

KINDS = ("plain", "fused")
MOST_EXTRA, MOST_TIME = 0.3, 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """T tokens, hidden states of width H, V words."""

    tokens: int
    width: int
    words: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse TxHxV."""
        tokens, width, words = map(int, text.split("x"))
        return cls(tokens=tokens, width=width, words=words)

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}x{self.words}"


class Layer:
    """Hidden states, an output layer and targets."""

    def __init__(self, shape: Shape) -> None:
        seed_everything(0)
        self.hidden = torch.empty(shape.tokens, shape.width).normal_().requires_grad_()
        weight = torch.empty(shape.words, shape.width).normal_(std=shape.width**-0.5)
        self.weight = weight.requires_grad_()
        self.targets = torch.randint(shape.words, (shape.tokens,))

    @property
    def nbytes(self) -> int:
        """Of the gradients of hidden states and weight."""
        return self.hidden.nbytes + self.weight.nbytes

    def learn(self, kind: str, tiling: Tiling) -> float:
        """Go forward and backward; return the loss."""
        self.hidden.grad = None
        loss = self._plain() if kind == "plain" else self._fused(tiling)
        backward(loss)
        return float(loss.detach())

    def _plain(self) -> Tensor:
        return functional.cross_entropy(functional.linear(self.hidden, self.weight), self.targets)

    def _fused(self, tiling: Tiling) -> Tensor:
        head = Head(
            weight=self.weight,
            bias=None,
            targets=self.targets,
            temperatures=None,
            banned=self.targets[:0].cpu(),
            tiling=tiling,
            adds_up=True,
        )
        return -fused_logprobs(self.hidden, head)[0].mean()


def measure(kind: str, shape: Shape, tiling: Tiling, *, threads: int, passes: int) -> Any:
    """Measure the last of some passes in this process."""
    torch.set_num_threads(threads)
    # Loads the kernels, which are no part of what a loss takes.
    Layer(Shape(tokens=64, width=64, words=256)).learn(kind, tiling)
    layer = Layer(shape)
    stands = resident_nbytes() + layer.nbytes
    for _ in range(passes):
        cpu, wall = time.process_time(), time.perf_counter()
        loss = layer.learn(kind, tiling)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "loss": loss,
        "cpu_s": round(cpu, 3),
        "wall_s": round(wall, 3),
        "extra_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - stands,
        "gradient": float(layer.weight.grad.norm()) if layer.weight.grad is not None else 0.0,
    }


def resident_nbytes() -> int:
    """Return what of this process is in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def spawn(kind: str, shape: Shape, given: argparse.Namespace, threads: int) -> Any:
    """Measure in a process of its own."""
    options = ["--threads", str(threads), "--passes", str(given.passes), "--tile", given.tile]
    command = [sys.executable, __file__, "--one", kind, "--shapes", str(shape), *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def ratio(runs: Mapping[str, Sequence[Any]], time_of: str) -> float:
    """Return the least time of ours over that of plain."""
    fused, plain = (min(run[time_of] for run in runs[kind]) for kind in ("fused", "plain"))
    return fused / plain


def compare(shape: Shape, threads: int, given: argparse.Namespace) -> dict[str, Any]:
    """Let both take turns; return what they took and the ratios of the best."""
    runs: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for _, kind in product(range(given.rounds), KINDS):
        runs[kind].append(spawn(kind, shape, given, threads))
    ratios = {time_of: ratio(runs, time_of) for time_of in ("cpu_s", "wall_s")}
    hidden_nbytes = shape.tokens * shape.width * 4
    extra = max(each["extra_nbytes"] for each in runs["fused"])
    return {
        "shape": asdict(shape),
        "threads": threads,
        "passes": given.passes,
        "runs": runs,
        "cpu_ratio": round(ratios["cpu_s"], 3),
        "wall_ratio": round(ratios["wall_s"], 3),
        "extra_of_hidden": round(extra / hidden_nbytes, 3),
        "holds": max(ratios.values()) <= MOST_TIME and extra <= MOST_EXTRA * hidden_nbytes,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["8192x2048x131072"], help="TxHxV")
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tile", default="2048x1024", help="tokens x words")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    tokens, words = map(int, given.tile.split("x"))
    tiling = Tiling(token_count=tokens, word_count=words)
    shapes = [Shape.read(text) for text in given.shapes]
    if given.one:
        threads = given.threads[0]
        found = measure(given.one, shapes[0], tiling, threads=threads, passes=given.passes)
        print(json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for threads in given.threads:
            rows.append(compare(shape, threads, given))
            print(json.dumps(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"tile": given.tile, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
