"""The training of a recipe in one process: what the distributed run is measured against.

Generation is `transformers`' own, in one static batch per step; the optimizer steps are those
of the trainer. Nothing runs beside anything else, so every batch is of the newest weights.

    python benchmarks/overhead.py --threads 1 2 --json reference.json
    python benchmarks/overhead.py --threads 1 2 --rounds 3 --json overhead.json

With `--rounds` the distributed run takes turns with the one process, so that both meet the same
machine; the ratio is that of one round, to the best thread count of the round. "As shipped"
evaluates 2,048 prompts beside the first steps, which the one process does not do in its time;
"training only" leaves the evaluations out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Recipe
from astraflow.core.algorithms.advantages import advantages_of
from astraflow.core.settings import AdvantageSettings
from astraflow.storage.cache import cache_dir
from astraflow.trainers.causal_model import CausalModel, load_causal_model, prepare_torch
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.warm_up import ensure_model
from one_process.samples import Samples
from one_process.task import SortTask

SORT = Path(__file__).parent.parent / "recipes" / "sort.yaml"


class Sampler:
    """Generates with transformers, at temperature 1."""

    def __init__(self, model: CausalModel, tokenizer: Any, *, max_new_tokens: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._module: Any = model.module
        self._settings = {
            "do_sample": True,
            "top_k": 0,
            "max_new_tokens": max_new_tokens,
            "suppress_tokens": model.never_sampled.tolist(),
            "pad_token_id": 0,
            "return_dict_in_generate": True,
            "output_scores": True,
        }

    @torch.no_grad()
    def sample(self, prompts: Sequence[str]) -> Samples:
        """Sample one completion of each prompt."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(prompts))]
        width = max(map(len, ids))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        out = self._module.generate(tokens, attention_mask=mask, **self._settings)
        completions = out.sequences[:, width:]
        scores = torch.stack(out.scores, 1).log_softmax(-1)
        logprobs = scores.gather(2, completions[:, :, None])[:, :, 0].numpy()
        eos = self._module.generation_config.eos_token_id
        is_end = (completions == eos).numpy()
        counts = np.where(is_end.any(1), is_end.argmax(1) + 1, completions.shape[1])
        drawn = completions.numpy().astype(np.int32)
        return Samples(
            prompts=ids,
            completions=[row[:count] for row, count in zip(drawn, counts, strict=True)],
            logprobs=[row[:count] for row, count in zip(logprobs, counts, strict=True)],
        )

    def text(self, completion: np.ndarray) -> str:
        """Return a completion without special tokens."""
        return str(self._tokenizer.decode(completion.tolist(), skip_special_tokens=True))


class Reference:
    """GRPO on letter sort in one process."""

    def __init__(self, recipe: Recipe) -> None:
        self._policy = next(iter(recipe.policies.values()))
        self._recipe = recipe
        directory = ensure_model(self._policy.model, seed=recipe.seed, cache_dir=cache_dir())
        self._model = load_causal_model(directory, device="cpu")
        self._learner = PolicyLearner(self._model, self._policy.trainer)
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._sampler = Sampler(
            self._model, tokenizer, max_new_tokens=self._policy.sampling.max_new_tokens
        )
        self._task = SortTask(recipe)
        torch.manual_seed(recipe.seed)

    def train(self, step_count: int) -> list[Mapping[str, float]]:
        """Make the steps; return their metrics."""
        prompts = self._task.draws("train")
        return [self._step(prompts) for _ in range(step_count)]

    def accuracy(self) -> float:
        """Return the share of held-out prompts that are answered correctly at temperature 1."""
        rows = self._task.first("held_out", 2048)
        return float(np.mean([self._rewards(rows[i : i + 512]) for i in range(0, len(rows), 512)]))

    def _step(self, prompts: Iterator[Mapping[str, Any]]) -> Mapping[str, float]:
        size = self._recipe.rollouts.group_size
        groups = [next(prompts) for _ in range(self._policy.trainer.groups_per_batch)]
        rows = [row for row in groups for _ in range(size)]
        samples = self._sampler.sample([row["prompt"] for row in rows])
        rewards = self._rewards_of(rows, samples).reshape(-1, size)
        advantages = np.concatenate([advantages_of(r, AdvantageSettings()) for r in rewards])
        batch = samples.to_rows(advantages)
        learned = self._learner.step(batch, divisor=len(batch.loss))
        return {**learned, "reward/mean": float(rewards.mean())}

    def _rewards(self, rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        return self._rewards_of(rows, self._sampler.sample([row["prompt"] for row in rows]))

    def _rewards_of(self, rows: Sequence[Mapping[str, Any]], samples: Samples) -> np.ndarray:
        return self._task.rewards(rows, map(self._sampler.text, samples.completions))


def measure(recipe: Recipe, *, threads: int, step_count: int) -> dict[str, Any]:
    """Train once and return times and accuracies."""
    prepare_torch(thread_count=threads)
    reference = Reference(recipe)
    before = reference.accuracy()
    started = time.perf_counter()
    steps = reference.train(step_count)
    train_s = time.perf_counter() - started
    rewards = [step["reward/mean"] for step in steps]
    return {
        "seed": recipe.seed,
        "threads": threads,
        "steps": step_count,
        "train_s": round(train_s, 3),
        "accuracy_before": before,
        "accuracy_after": reference.accuracy(),
        "reward_by_20": [
            round(float(np.mean(rewards[i : i + 20])), 3) for i in range(0, len(rewards), 20)
        ],
        "entropy_first_last": [steps[0]["train/entropy"], steps[-1]["train/entropy"]],
        "mismatch_logp_abs_max": max(step["mismatch/logp_abs_max"] for step in steps),
    }


def distribute(settings: Sequence[str]) -> float:
    """Return the seconds from the first task to the last version of a distributed run."""
    options = [f"--set={setting}" for setting in settings]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "astraflow", "run", str(SORT), *options]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(Path(folder, "runs/sort/summary.json").read_text())["train_s"])


def compare(recipe: Recipe, given: argparse.Namespace) -> dict[str, Any]:
    """Let the distributed run and the one process take turns; return times and ratios."""
    shared = [f"seed={given.seed}", *given.set]
    rounds: list[dict[str, Any]] = []
    for _ in range(given.rounds):
        single_s = min(
            measure(recipe, threads=n, step_count=given.steps)["train_s"] for n in given.threads
        )
        shipped_s, training_s = distribute(shared), distribute([*shared, "evals={}"])
        rounds.append(
            {
                "one_process_s": single_s,
                "as_shipped_s": shipped_s,
                "training_only_s": training_s,
                "as_shipped": round(shipped_s / single_s, 3),
                "training_only": round(training_s / single_s, 3),
            }
        )
        print(rounds[-1], flush=True)
    ratios = {
        name: statistics.median(each[name] for each in rounds)
        for name in ("as_shipped", "training_only")
    }
    return {"threads": given.threads, "rounds": rounds, "median_ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="a.b=c of the recipe")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=0, help="compare with distributed runs")
    parser.add_argument("--json", type=Path, help="where to write the result")
    given = parser.parse_args()
    recipe = load_recipe(SORT, [f"seed={given.seed}", *given.set])
    if given.rounds:
        result = compare(recipe, given)
    else:
        runs = [measure(recipe, threads=n, step_count=given.steps) for n in given.threads]
        result = {"runs": runs, "train_s": min(run["train_s"] for run in runs)}
    text = json.dumps(result, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
