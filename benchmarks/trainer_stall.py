"""What publishing costs the trainer: the same steps with and without a version after each.

    python benchmarks/trainer_stall.py --json trainer_stall.json
    python benchmarks/trainer_stall.py --models 256m --tokens 1024 --blocks 2

Steps are those of the built-in engine on made-up rows. Blocks of steps that publish take turns with
blocks that do not; a puller in a process of its own takes every version. Blocked is what the
training thread waits for a version: in `publish`, and before weights change. Slowed compares the
medians of both kinds of steps, publishing included; by the wall clock, and by the CPU time of the
training thread, which is what a busy machine leaves comparable.
"""

import argparse
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from astraflow.client.trainer import TrainerBatch
from astraflow.config.recipe import Optimizer, Trainer
from astraflow.conformance.engine_batches import batch_of
from astraflow.core.batches import BatchPart
from astraflow.core.dtype import Dtype
from astraflow.core.ids import BatchId, RolloutId, TrajectoryId
from astraflow.core.rollouts import Column, ColumnAxis
from astraflow.core.versions import Source, SourceKind, SourceState, VersionInfo
from astraflow.telemetry.logging import configure_logging
from astraflow.trainers.origin import WeightOrigin
from astraflow.trainers.published_layout import published_layout
from astraflow.trainers.torch_engine import TorchEngine
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.server import WeightServer
from astraflow.wire.versions import encode_version_info
from fanout_ends.origin import POLICY, TOKEN

HERE: Final = Path(__file__).parent
MOST_BLOCKED, MOST_SLOWED = 0.02, 0.05
# Model, tokens of a step, steps of a block.
MODELS: Final[dict[str, tuple[dict[str, Any], int, int]]] = {
    "demo": (
        {
            "vocab_size": 14,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "tie_word_embeddings": True,
        },
        1600,
        10,
    ),
    "256m": (
        {
            "vocab_size": 32_768,
            "hidden_size": 1024,
            "intermediate_size": 3456,
            "num_hidden_layers": 15,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        1024,
        1,
    ),
}


class Puller:
    """A process that pulls every version; it is told of each once it is made."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        command = [sys.executable, "-m", "fanout_ends.receiver"]
        self._process = subprocess.Popen(
            command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()
        self._told = 0

    def announce(self, info: Future[VersionInfo], *, then: Callable[[], None]) -> None:
        """Tell it of a version."""
        info.add_done_callback(self._tell)
        info.add_done_callback(lambda _: then())

    def wait(self) -> int:
        """Wait until all were pulled; return how many."""
        for _ in range(self._told):
            self._read()
        return self._told

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _tell(self, made: Future[VersionInfo]) -> None:
        message = encode_version_info(served(made.result(), self._endpoint)).SerializeToString()
        line = json.dumps({"info": base64.b64encode(message).decode()})
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._told += 1

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()


def served(info: VersionInfo, endpoint: str) -> VersionInfo:
    """Return a version with who has it."""
    source = Source(kind=SourceKind.ORIGIN, state=SourceState.LIVE, endpoint=endpoint)
    return replace(info, sources=(source,))


def made_rows(vocabulary: int, token_count: int, seed: int) -> TrainerBatch:
    """Return a batch of rows of 16 tokens, of which the last half was sampled."""
    rng, length = np.random.default_rng(seed), 16
    row_count = token_count // length
    mask = np.tile(np.arange(length) >= length // 2, row_count)
    tokens = rng.integers(3, vocabulary, row_count * length).astype(np.int32)
    values = {
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        "advantages": np.where(mask, np.repeat(rng.normal(size=row_count), length), 0).astype(
            np.float32
        ),
    }
    names = [f"row-{number}" for number in range(row_count)]
    part = BatchPart(
        batch_id=BatchId("made"),
        index=0,
        row_offsets=np.arange(0, len(tokens) + 1, length, dtype=np.int64),
        trajectory_ids=tuple(map(TrajectoryId, names)),
        rollout_ids=tuple(map(RolloutId, names)),
        columns={name: Column(axis=ColumnAxis.TOKEN, values=each) for name, each in values.items()},
    )
    return batch_of((part,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, with the version that follows it.

    Attributes:
        wall_s: By the clock.
        cpu_s: Of the training thread.
        held_s: Waited for a version: for the one before, and for its own.
    """

    wall_s: float
    cpu_s: float
    held_s: float


def made_engine(folder: Path, shape: dict[str, Any], threads: int) -> TorchEngine:
    """Return the built-in engine with random weights."""
    write_weights(folder, shape)
    engine = TorchEngine(settings_of(threads), model_dir=folder)
    engine.prepare()
    return engine


def write_weights(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model with random weights."""
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**shape, **ids)).save_pretrained(folder)


def settings_of(threads: int) -> Trainer:
    """Return those of a trainer on the CPU."""
    return Trainer(optimizer=Optimizer(learning_rate=1e-5), thread_count=threads, device="cpu")


def timed(engine: TorchEngine, origin: WeightOrigin, batch: TrainerBatch, publishes: bool) -> Step:
    """Make a step, and its version; return what they took."""
    held_s, wall, cpu = origin.held_s, time.perf_counter(), time.thread_time()
    engine.train_step(batch)
    began = time.perf_counter()
    if publishes:
        origin.publish(step=engine.step_count)
    ended = time.perf_counter()
    return Step(
        wall_s=ended - wall,
        cpu_s=time.thread_time() - cpu,
        held_s=origin.held_s - held_s + (ended - began),
    )


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return what versions cost the steps of one model."""
    shape, token_count, step_count = MODELS[name]
    token_count, step_count = given.tokens or token_count, given.steps or step_count
    with tempfile.TemporaryDirectory() as folder:
        engine = made_engine(Path(folder), shape, given.threads)
        layout = published_layout(engine.named_parameters(), Dtype.BF16)
        publisher = WeightPublisher(POLICY, layout)
        with WeightServer(publisher) as server:
            server.set_transfer_token(TOKEN)
            puller = Puller(server.endpoint)
            origin = WeightOrigin(
                engine, layout=layout, publisher=publisher, herald=puller, first_version=0
            )
            origin.publish(step=0)
            batch = made_rows(shape["vocab_size"], token_count, seed=0)
            engine.train_step(batch)
            kinds: dict[bool, list[Step]] = {True: [], False: []}
            for _ in range(given.blocks):
                for publishes in (False, True):
                    steps = [timed(engine, origin, batch, publishes) for _ in range(step_count)]
                    origin.hold()
                    kinds[publishes] += steps
            version_count = puller.wait()
            puller.close()
    return summary(kinds[False], kinds[True]) | {
        "parameters": sum(spec.element_count for spec in layout.tensors),
        "tokens": token_count,
        "versions_pulled": version_count,
    }


def summary(alone: list[Step], publishing: list[Step]) -> dict[str, Any]:
    """Return medians of both kinds of steps, and what one costs the other."""
    wall, cpu = (
        [statistics.median(getattr(step, name) for step in steps) for steps in (alone, publishing)]
        for name in ("wall_s", "cpu_s")
    )
    held_s = statistics.median(step.held_s for step in publishing)
    slowed = wall[1] / wall[0] - 1
    return {
        "step_s": wall[0],
        "publishing_step_s": wall[1],
        "held_s": held_s,
        "blocked": round(held_s / wall[1], 4),
        "slowed": round(slowed, 4),
        "slowed_cpu": round(cpu[1] / cpu[0] - 1, 4),
        "steps": len(alone),
        "holds": held_s <= MOST_BLOCKED * wall[1] and slowed <= MOST_SLOWED,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--tokens", type=int, help="of a step; unset: as the model has them")
    parser.add_argument("--steps", type=int, help="of a block; unset: as the model has them")
    parser.add_argument("--blocks", type=int, default=6, help="of each kind")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer")
    parser.add_argument("--json", type=Path, help="where to write the result")
    given = parser.parse_args()
    configure_logging("trainer", level="warning")
    result = {name: measure(name, given) for name in given.models}
    print(json.dumps(result, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
