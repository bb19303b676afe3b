"""What publishing costs the trainer: the same steps with and without a version after each.

    python benchmarks/trainer_stall.py --json trainer_stall.json
    python benchmarks/trainer_stall.py --models 256m --tokens 1024 --blocks 2

Steps are those of the built-in engine on made-up rows. Short blocks of steps that publish take
turns with blocks that do not; a puller in a process of its own takes every version. Blocked is what
the training thread waits for a version: in `publish`, and before weights change. Slowed compares
the median steps of two blocks of one round, publishing included, and is the median over all rounds:
a machine whose speed drifts leaves neighbours comparable. It is there by the wall clock, and by the
CPU time of the training thread.

The puller runs on the trainer's machine here. What that costs where cores share a processor with
others is told by blocks of a third kind, `beside`: nothing is published, and a process that has
nothing to do with the trainer takes as much CPU time after each step as versions take in the second
kind, those of the encoder and of the puller.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from astraflow.client.trainer import TrainerBatch
from astraflow.config.recipe import Optimizer, TrainerConfig
from astraflow.conformance.engine_bench import batch_of
from astraflow.core.batches import BatchPart
from astraflow.core.ids import BatchId, RolloutId, TrajectoryId
from astraflow.core.rollouts import Column, ColumnAxis
from astraflow.core.tensors import Dtype
from astraflow.core.versions import SourceInfo, SourceKind, SourceState, VersionInfo
from astraflow.telemetry.logging import configure_logging
from astraflow.trainers.main import shared_interpreter
from astraflow.trainers.origin import Publishing, WeightOrigin, published_layout
from astraflow.trainers.torch_engine import TorchEngine
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer
from astraflow.wire.versions import encode_version_info
from fanout_ends.origin import POLICY, TOKEN

HERE: Final = Path(__file__).parent
MOST_BLOCKED, MOST_SLOWED = 0.02, 0.05


class Kind(StrEnum):
    """What goes on beside the steps of a block."""

    ALONE = "alone"
    PUBLISHING = "publishing"
    BESIDE = "beside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, and how its steps are measured.

    Attributes:
        shape: Of a Llama.
        token_count: Of a step.
        step_count: Steps of a block.
        round_count: Blocks of each kind.
    """

    shape: dict[str, Any]
    token_count: int
    step_count: int
    round_count: int


MODELS: Final = {
    "demo": Model(
        shape={
            "vocab_size": 14,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "tie_word_embeddings": True,
        },
        token_count=1600,
        step_count=5,
        round_count=120,
    ),
    "256m": Model(
        shape={
            "vocab_size": 32_768,
            "hidden_size": 1024,
            "intermediate_size": 3456,
            "num_hidden_layers": 15,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        token_count=1024,
        step_count=1,
        round_count=6,
    ),
}
# Takes as many seconds of CPU time as each line says, and answers then.
BURDEN: Final = """
import sys, time
for line in sys.stdin:
    end = time.thread_time() + float(line)
    while time.thread_time() < end:
        sum(range(1000))
    print(flush=True)
"""


class Burden:
    """A process that takes CPU time when it is told to."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", BURDEN]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._told = 0

    def take(self, cpu_s: float) -> None:
        """Take so many seconds, beside the caller."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{cpu_s}\n")
        self._process.stdin.flush()
        self._told += 1

    def wait(self) -> None:
        """Wait until all of it is taken."""
        assert self._process.stdout is not None
        for _ in range(self._told):
            self._process.stdout.readline()
        self._told = 0

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class Puller:
    """A process that pulls every version; it is told of each once it is made.

    Attributes:
        cpu_s: What the pulls took, in all.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        command = [sys.executable, "-m", "fanout_ends.receiver"]
        self._process = subprocess.Popen(
            command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()
        self._told = self._pulled = 0
        self.cpu_s = 0.0

    def announce(self, info: Future[VersionInfo], *, then: Callable[[], None]) -> None:
        """Tell it of a version."""
        info.add_done_callback(self._tell)
        info.add_done_callback(lambda _: then())

    def wait(self) -> int:
        """Wait until all were pulled; return how many."""
        while self._pulled < self._told:
            self.cpu_s += self._read()["cpu_s"]
            self._pulled += 1
        return self._pulled

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

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def served(info: VersionInfo, endpoint: str) -> VersionInfo:
    """Return a version with who has it."""
    source = SourceInfo(kind=SourceKind.ORIGIN, state=SourceState.LIVE, endpoint=endpoint)
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


Round = dict[Kind, list[Step]]
"""A block of each kind, one after the other."""


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


def settings_of(threads: int) -> TrainerConfig:
    """Return those of a trainer on the CPU."""
    return TrainerConfig(
        optimizer=Optimizer(learning_rate=1e-5), thread_count=threads, device="cpu"
    )


class Encoder(Publishing):
    """Publishing whose thread's CPU time is told.

    Attributes:
        cpu_s: What versions took, in all.
        count: How many there were.
    """

    def __init__(self, publisher: WeightPublisher) -> None:
        super().__init__(publisher)
        self.cpu_s, self.count = 0.0, 0

    def publish(self, *args: Any, **kwargs: Any) -> VersionInfo:
        """Make a version."""
        began = time.thread_time()
        info = super().publish(*args, **kwargs)
        self.cpu_s, self.count = self.cpu_s + time.thread_time() - began, self.count + 1
        return info


def timed(engine: TorchEngine, origin: WeightOrigin, batch: TrainerBatch, kind: Kind) -> Step:
    """Make a step, and its version; return what they took."""
    last = origin._last  # noqa: SLF001 - what the step waits for
    held_s, wall, cpu = last.held_s, time.perf_counter(), time.thread_time()
    engine.train_step(batch)
    held_s = last.held_s - held_s
    began = time.perf_counter()
    if kind is Kind.PUBLISHING:
        origin.publish(step=engine.step_count)
    ended = time.perf_counter()
    return Step(
        wall_s=ended - wall,
        cpu_s=time.thread_time() - cpu,
        held_s=held_s + (ended - began),
    )


def measured(
    step: Callable[[Kind], Step], kinds: Sequence[Kind], model: Model, *, settle: Callable[[], None]
) -> list[Round]:
    """Make blocks of steps, of all kinds in turns.

    Args:
        step: Makes one.
        kinds: Of blocks.
        model: Says how many of each.
        settle: Called between two blocks: waits for what the last one left to be done.
    """
    rounds: list[Round] = []
    for number in range(model.round_count):
        rounds.append({})
        for kind in kinds if number % 2 else reversed(kinds):
            settle()
            rounds[-1][kind] = [step(kind) for _ in range(model.step_count)]
    settle()
    return rounds


def measure(model: Model, folder: Path, threads: int) -> dict[str, Any]:
    """Return what versions cost the steps of one model."""
    engine = made_engine(folder, model.shape, threads)
    batch = made_rows(model.shape["vocab_size"], model.token_count, seed=0)
    layout = published_layout(engine.named_parameters(), Dtype.BF16)
    encoder, burden = Encoder(WeightPublisher(POLICY, layout)), Burden()
    with WeightServer(encoder.own) as server:
        server.set_transfer_token(TOKEN)
        puller = Puller(server.endpoint)
        origin = WeightOrigin(
            engine, layout=layout, publishing=encoder, herald=puller, first_version=0
        )

        def settle() -> None:
            origin.hold()
            puller.wait()
            burden.wait()

        def step(kind: Kind) -> Step:
            made = timed(engine, origin, batch, kind)
            if kind is Kind.BESIDE:
                burden.take((encoder.cpu_s + puller.cpu_s) / encoder.count)
            return made

        origin.publish(step=0)
        engine.train_step(batch)
        rounds = measured(step, [*Kind], model, settle=settle)
        version_count = puller.wait()
        puller.close()
        burden.close()
    return summary(rounds) | {
        "parameters": sum(spec.element_count for spec in layout.tensors),
        "tokens": model.token_count,
        "versions_pulled": version_count,
    }


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Return medians of the kinds of steps, and what versions cost the others."""
    step_s, publishing_s = (
        typical([step for each in rounds for step in each[kind]], "wall_s")
        for kind in (Kind.ALONE, Kind.PUBLISHING)
    )
    held_s = typical([step for each in rounds for step in each[Kind.PUBLISHING]], "held_s")
    slowed = median_slowed(rounds, Kind.PUBLISHING, "wall_s")
    costs: dict[str, Any] = {
        "step_s": step_s,
        "publishing_step_s": publishing_s,
        "held_s": held_s,
        "blocked": round(held_s / publishing_s, 4),
        "slowed": slowed,
        "slowed_cpu": median_slowed(rounds, Kind.PUBLISHING, "cpu_s"),
        "steps": sum(len(each[Kind.ALONE]) for each in rounds),
        "holds": held_s <= MOST_BLOCKED * publishing_s and slowed <= MOST_SLOWED,
        "load": os.getloadavg()[0],
    }
    if Kind.BESIDE in rounds[0]:
        costs["slowed_beside"] = median_slowed(rounds, Kind.BESIDE, "wall_s")
    return costs


def median_slowed(rounds: list[Round], kind: Kind, name: str) -> float:
    """Return by what share one of the numbers is higher than alone, in the middle of all rounds."""
    ratios = [typical(each[kind], name) / typical(each[Kind.ALONE], name) for each in rounds]
    return round(statistics.median(ratios) - 1, 4)


def typical(steps: list[Step], name: str) -> float:
    """Return the median of one of their numbers."""
    return statistics.median(getattr(step, name) for step in steps)


def asked(model: Model, given: argparse.Namespace) -> Model:
    """Return a model measured as the command line says."""
    return replace(
        model,
        token_count=getattr(given, "tokens", None) or model.token_count,
        step_count=given.steps or model.step_count,
        round_count=given.blocks or model.round_count,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--tokens", type=int, help="of a step; unset: as the model has them")
    parser.add_argument("--steps", type=int, help="of a block; unset: as the model has them")
    parser.add_argument("--blocks", type=int, help="of each kind; unset: as the model has them")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer")
    parser.add_argument("--json", type=Path, help="where to write the result")
    given = parser.parse_args()
    configure_logging("trainer", level="warning")
    with shared_interpreter(), tempfile.TemporaryDirectory() as folder:
        result = {
            name: measure(asked(MODELS[name], given), Path(folder) / name, given.threads)
            for name in given.models
        }
    print(json.dumps(result, indent=2))
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
