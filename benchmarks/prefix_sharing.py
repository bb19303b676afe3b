"""What a step takes when tokens that rows begin with in common are computed once, or rows packed.

    python benchmarks/prefix_sharing.py --json prefix_sharing.json
    python benchmarks/prefix_sharing.py --model path/to/model --batches 8x8x30+5 8x8x150+20
    python benchmarks/prefix_sharing.py --batches 16x1x20+10-400

A batch of GxNxP+C has G groups of N rows: a prompt of P tokens that they share, and C tokens of
their own, on which the loss applies (A-B: of each row from A to B, by chance); `--preamble` tokens
begin all prompts alike, as examples or a system prompt do. The ways take turns in one process; told
is the least time of each, by the clock and of the processor, and how far their gradients are from
those of rows alone. Without `--model` the model is a Llama of the shape of SmolLM2-135M, with
random weights. The last way is that of rows alone with f32 products left to MKL, where
`astraflow.engines.modules` gives them to oneDNN.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.config.recipe import TrainerConfig
from astraflow.engines import modules
from astraflow.trainers.causal_model import CausalModel, load_causal_model
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.rows import LossTokens, TrainRows
from astraflow.trainers.tensors import seed_everything

WAYS = {
    "shared": {"share_prefixes": "always", "packing": "never"},
    "packed": {"share_prefixes": "never", "packing": "always"},
    "alone": {"share_prefixes": "never", "packing": "never"},
    "alone, MKL": {"share_prefixes": "never", "packing": "never"},
}


def random_model() -> CausalModel:
    """Return a model of the shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - seconds to import

    seed_everything(0)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope_theta=1e5,
    )
    return CausalModel(modules.use_onednn(LlamaForCausalLM(config)))


def batch_of(shape: str, preamble: int, vocabulary: int) -> TrainRows:
    """Return the rows of GxNxP+C."""
    groups, count, prompt, least, *most = map(int, re.split(r"[x+-]", shape))
    chance = np.random.default_rng(0)
    start = chance.integers(3, vocabulary, preamble)
    rows: list[np.ndarray] = []
    owns = chance.integers(least, (most or [least])[0] + 1, groups * count)
    for group in owns.reshape(groups, count):
        shared = np.concatenate([start, chance.integers(3, vocabulary, prompt)])
        rows += [np.concatenate([shared, chance.integers(3, vocabulary, own)]) for own in group]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    positions = np.concatenate(
        [np.arange(end - own, end) for end, own in zip(offsets[1:], owns, strict=True)]
    )
    size, row_count = len(positions), len(rows)
    return TrainRows(
        tokens=np.concatenate(rows).astype(np.int32),
        offsets=offsets,
        loss=LossTokens(
            positions=positions,
            rows=np.repeat(np.arange(row_count), owns),
            sampler_logprobs=np.full(size, -np.log(vocabulary), np.float32),
            advantages=chance.normal(size=size).astype(np.float32),
            weights=np.ones(size, np.float32),
            temperatures=np.ones(size, np.float32),
        ),
        rewards=np.zeros(row_count, np.float32),
        min_versions=np.zeros(row_count, np.int64),
        max_versions=np.zeros(row_count, np.int64),
    )


class GradientsOnly(PolicyLearner):
    """Makes the gradient of a batch, and leaves the weights."""

    def gradient(self, rows: TrainRows) -> dict[str, torch.Tensor]:
        """Return it by the names of the weights, and forget it."""
        self._model.module.zero_grad()
        seen_plan = self._planner.plan(rows, np.ones(rows.row_count, np.bool_))
        self.token_count = sum(one.padded_token_count for one in seen_plan)
        step, self._optimizer.step = self._optimizer.step, lambda _step: 0.0
        try:
            self.step(rows, divisor=len(rows.loss))
        finally:
            self._optimizer.step = step
        return {n: p.grad for n, p in self.trained_parameters.items() if p.grad is not None}


def measure(model: CausalModel, rows: TrainRows, given: argparse.Namespace) -> dict[str, Any]:
    """Let the ways take turns; return the least time of each."""
    learners = {
        way: GradientsOnly(model, TrainerConfig.model_validate(settings))
        for way, settings in WAYS.items()
    }
    found: dict[str, Any] = {way: {"wall_s": [], "cpu_s": []} for way in WAYS}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    is_faster = modules.onednn_is_faster
    for _ in range(given.rounds):
        for way in WAYS:
            modules.onednn_is_faster = (lambda: False) if "MKL" in way else is_faster
            cpu, wall = time.process_time(), time.perf_counter()
            gradient = learners[way].gradient(rows)
            found[way]["cpu_s"].append(time.process_time() - cpu)
            found[way]["wall_s"].append(time.perf_counter() - wall)
            found[way]["token_count"] = learners[way].token_count
            gradients[way] = {name: each.clone() for name, each in gradient.items()}
    modules.onednn_is_faster = is_faster
    for way in WAYS:
        for name in ("cpu_s", "wall_s"):
            found[way][name] = round(min(found[way][name]), 3)
    return {
        **found,
        "ratios": {
            way: {
                "alone_cpu": round(found["alone"]["cpu_s"] / found[way]["cpu_s"], 2),
                "alone_wall": round(found["alone"]["wall_s"] / found[way]["wall_s"], 2),
                "gradients_apart": apart(gradients[way], gradients["alone"]),
            }
            for way in ("shared", "packed")
        },
    }


def apart(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference over that of one of them."""
    difference = sum(float((left[name] - right[name]).square().sum()) for name in right)
    return (difference / sum(float(each.square().sum()) for each in right.values())) ** 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--batches", nargs="+", default=["8x8x30+5", "8x8x150+20"])
    parser.add_argument("--preamble", type=int, default=0, help="tokens that begin all prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    model = random_model() if given.model is None else load_causal_model(given.model, device="cpu")
    results: dict[str, Any] = {}
    for shape in given.batches:
        rows = batch_of(shape, given.preamble, model.vocabulary_size)
        results[shape] = one = measure(model, rows, given)
        print(f"{shape}, {given.preamble} tokens before all:")
        for way in WAYS:
            tokens, cpu, wall = (one[way][name] for name in ("token_count", "cpu_s", "wall_s"))
            print(f"  {way:12} {tokens:8} tokens {cpu:8.2f} s of the processor {wall:8.2f} s")
        for way, each in one["ratios"].items():
            ratio, gap = each["alone_cpu"], each["gradients_apart"]
            print(f"  alone / {way} {ratio:.2f}, gradients {gap:.1e} apart")
    if given.json is not None:
        about = {"torch": torch.__version__, "threads": given.threads, "preamble": given.preamble}
        given.json.write_text(json.dumps({**about, "batches": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
