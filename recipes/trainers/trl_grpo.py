"""GRPO of trl on the batches of a run: what nodes sampled takes the place of generation.

    python trl_grpo.py RECIPE POLICY HOST:PORT TOKEN MODEL_DIR

Needs `pip install trl`. trl keeps its loop, its optimizer and its loss; a data set streams our
batches into it, one batch per step.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from astraflow import trainers
from astraflow.config.loader import load_recipe
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.streamed import BatchIterator


class Batches(IterableDataset):
    """The batches of a run, as GRPOTrainer computes its loss from them."""

    def __init__(self, stream: BatchIterator):
        self.stream = stream

    def __iter__(self):
        for batch in self.stream:
            yield inputs_of(TrainRows.from_parts(batch.parts), batch.header.loss_token_count)


class StreamedGrpo(GRPOTrainer):
    """Takes one batch of a data set for each optimizer step; it generates nothing."""

    def __init__(self, batches, **arguments):
        self.batches = batches
        prompts = Dataset.from_dict({"prompt": [""]})  # which it wants to see, and never reads
        super().__init__(reward_funcs=unused, train_dataset=prompts, **arguments)

    def get_train_dataloader(self):
        # Not accelerate's loader: that one asks for a batch before the last one is trained on.
        return DataLoader(self.batches, batch_size=None)

    def _prepare_inputs(self, inputs):
        return {name: torch.as_tensor(each).to(self.args.device) for name, each in inputs.items()}


class TrlEngine:
    """A train engine around trl."""

    def __init__(self, model_dir, output_dir, **settings):
        self.model_dir = model_dir
        self.settings = {
            "output_dir": output_dir,
            "max_steps": 1_000_000_000,
            "per_device_train_batch_size": 2,
            "num_generations": 2,
            "lr_scheduler_type": "constant",
            "loss_type": "dapo",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "bf16": False,
            "disable_dropout": True,
            **settings,
        }
        self.step_count = 0

    def prepare(self):
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)
        self.stream = BatchIterator()
        self.trainer = StreamedGrpo(
            Batches(self.stream), model=model, args=GRPOConfig(**self.settings)
        )
        self.stream.start(self.trainer.train)

    def train_step(self, batch):
        rows = TrainRows.from_parts(batch.parts)
        rows.require_vocabulary(self.trainer.model.config.vocab_size)
        if not rows.row_is_trained.any():
            self.step_count += 1
            return {"train/loss": 0.0}
        self.stream.step(batch)
        self.step_count += 1
        said = self.trainer.state.log_history[-1]
        return {f"train/{name}": said[name] for name in ("loss", "grad_norm") if name in said}

    def named_parameters(self):
        return self.trainer.model.named_parameters()

    def save(self, directory: Path):
        self.trainer.model.save_pretrained(directory)
        self.trainer.processing_class.save_pretrained(directory)
        state = {"adam": self.trainer.optimizer.state_dict(), "step_count": self.step_count}
        torch.save(state, directory / "optimizer.pt")

    def wait_for_save(self):
        pass

    def restore(self, directory: Path):
        try:
            state = torch.load(directory / "optimizer.pt")
            saved = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        except OSError as error:
            raise AstraflowError(Reason.INVALID_FIELD, f"no checkpoint: {error}") from error
        self.trainer.model.load_state_dict(saved.state_dict())
        self.trainer.optimizer.load_state_dict(state["adam"])
        self.step_count = state["step_count"]


def inputs_of(rows: TrainRows, loss_token_count: int):
    """Return what GRPOTrainer computes its loss from; prompts end at the first sampled token."""
    first = np.full(rows.row_count, -1)
    first[rows.loss.rows[::-1]] = rows.loss.positions[::-1]
    cuts = [(rows.offsets[row], first[row], rows.offsets[row + 1])
            for row in range(rows.row_count) if first[row] >= 0]  # fmt: skip
    columns = {
        "completion_mask": np.ones(len(rows.tokens), np.int64),
        "tool_mask": spread(rows, np.ones(len(rows.loss), np.int64)),
        "advantages": spread(rows, rows.loss.advantages * rows.loss.weights),
        "old_per_token_logps": spread(rows, rows.loss.sampler_logprobs),
    }
    tokens = rows.tokens.astype(np.int64)
    prompts = [tokens[start:cut] for start, cut, _ in cuts]
    return {
        "prompt_ids": padded(prompts, side="left"),
        "prompt_mask": padded([np.ones_like(prompt) for prompt in prompts], side="left"),
        "completion_ids": padded([tokens[cut:end] for _, cut, end in cuts]),
        **{
            name: padded([values[cut:end] for _, cut, end in cuts])
            for name, values in columns.items()
        },
        "num_items_in_batch": torch.tensor(loss_token_count),
    }


def unused(completions, **_):
    """Stand in for a scorer: rewards came from the nodes, and are advantages already."""
    return [0.0] * len(completions)


def spread(rows: TrainRows, values: np.ndarray):
    """Return the values of loss tokens where they stand among all tokens, else 0."""
    found = np.zeros(len(rows.tokens), values.dtype)
    found[rows.loss.positions] = values
    return found


def padded(values, side="right"):
    """Return rows of one length, [n, L]."""
    parts = [torch.from_numpy(each) for each in values]
    return pad_sequence(parts, batch_first=True, padding_side=side)


if __name__ == "__main__":
    recipe, policy, hub, token, model_dir = sys.argv[1:]
    settings = load_recipe(Path(recipe)).policies[policy].trainer
    rate = settings.optimizer.learning_rate
    engine = TrlEngine(model_dir, f"runs/{policy}/trl", learning_rate=rate)
    trainers.run_engine(engine, hub=hub, token=token, policy=policy, settings=settings)
