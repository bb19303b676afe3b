"""The trainer's half: a base model that is loaded once, and the models that are trained on it."""

import copy
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn

from astraflow.config.lora import CONFIG_FILE, Lora, last_name
from astraflow.config.pool import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.embedded.model import twin_of
from astraflow.engines.modules import target_layers
from astraflow.engines.protocol import Likeliest
from astraflow.rpc.tls import Tls
from astraflow.tinker.losses import Batch, find_loss, require_known
from astraflow.tinker.requests import AdamParams
from astraflow.tinker.wire import TrainRequest
from astraflow.trainers import tensors
from astraflow.trainers.causal_model import CausalModel, load_module, naming_exhaustion
from astraflow.trainers.checkpoints import OPTIMIZER_FILE
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.lora import (
    adapter_settings,
    add_adapters,
    read_adapters,
    read_lora,
    write_adapters,
)
from astraflow.trainers.model_files import write_model
from astraflow.trainers.optimizer import read_state
from astraflow.trainers.passes import PassPlanner
from astraflow.trainers.tensors import backward, to_tensor

# No alpha is on the wire.
ALPHA: Final = 32.0
# Models that score prompts, beside those that are trained.
_SCORER_COUNT: Final = 2
# Logits of a prompt that are looked at in one go: 256 MiB in f32.
_LOOK_ELEMENTS: Final = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSettings:
    """What is served, and how.

    Attributes:
        model_dir: The Hugging Face directory that all models start from.
        base_model: What clients call it.
        max_tokens_per_pass: Of one forward and backward pass.
        token: That clients show; empty: they show none.
    """

    model_dir: Path
    base_model: str
    listen: str
    directory: Path
    engine: EngineSettings
    max_rank: int
    max_tokens_per_pass: int
    token: str = ""
    tls: Tls | None = None

    def __post_init__(self) -> None:
        """Refuse a key that no client could show."""
        if self.token and not self.token.startswith(("tml-", "eyJ")):
            raise AstraflowError(
                Reason.INVALID_FIELD, "the key: clients send only keys that begin with tml-"
            )


class LoadedBase:
    """The model that all start from. Its weights are in memory once, and never change."""

    def __init__(self, settings: TinkerSettings) -> None:
        self._module = load_module(settings.model_dir, device=settings.engine.device).eval()
        self._module.requires_grad_(requires_grad=False)
        own: int = cast("Any", self._module).config.get_text_config().max_position_embeddings
        self.settings = settings
        self._max_context = settings.engine.max_context or own
        self._scorers: OrderedDict[Path | None, CausalModel] = OrderedDict()

    def lora(self, *, rank: int, attention: bool = True, mlp: bool = True) -> Lora:
        """Return adapters of some of its layers.

        Raises:
            AstraflowError: INVALID_FIELD when that is none of them.
        """
        paths = target_layers(self._module, Lora())
        words = ("mlp", "expert", "moe", "feed_forward")
        targets = {
            last_name(path)
            for path in paths
            if (mlp if any(word in path for word in words) else attention)
        }
        if not targets:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                "lora_config: train_attn or train_mlp has to be true; the output layer is not "
                "adapted here",
            )
        return Lora(rank=rank, alpha=ALPHA, targets=tuple(sorted(targets)))

    @property
    def layer_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Outputs and inputs of every layer that can have an adapter, by its path."""
        layers = target_layers(self._module, Lora())
        return {path: (each.out_features, each.in_features) for path, each in layers.items()}

    def learner(self, lora: Lora | None, *, seed: int = 0) -> "Learner":
        """Return a model to train, as the base is; without adapters, all weights, in a copy."""
        model = self._model(lora, seed=seed)
        return Learner(model, lora, self.settings, max_context=self._max_context)

    def restored(self, checkpoint: Path, *, with_optimizer: bool) -> "Learner":
        """Return a model to train, as `Learner.save` left it."""
        learner = self.learner(lora_in(checkpoint))
        learner.load(checkpoint, with_optimizer=with_optimizer)
        return learner

    def prompt_logprobs(
        self, snapshot: Path | None, prompt: Sequence[int], *, last: int, likeliest_count: int
    ) -> tuple[np.ndarray, Sequence[Likeliest]]:
        """Return what the weights of a snapshot say of the tokens of a prompt.

        Args:
            snapshot: Directory of the weights; None: the base's own.
            prompt: At least one token.
            last: So many tokens at its end are scored.
            likeliest_count: Of the likeliest tokens at each position; 0: none are told.

        Returns:
            f32[prompt], NaN where there is none; and the likeliest tokens, none where there is no
            log-probability.

        Raises:
            AstraflowError: INVALID_FIELD for tokens that the model does not know.
        """
        tokens = np.array(prompt, np.int64)
        model = self._scorer(snapshot)
        require_known(tokens, model.vocabulary_size, "prompt")
        first = max(1, len(tokens) - last)
        logprobs = np.full(len(tokens), np.nan, np.float32)
        places: list[Likeliest] = [()] * len(tokens)
        step = max(1, _LOOK_ELEMENTS // model.vocabulary_size) if likeliest_count else len(tokens)
        with torch.no_grad(), naming_exhaustion(max_tokens=self.settings.max_tokens_per_pass):
            for start in range(first, len(tokens), step):
                some = slice(start, min(start + step, len(tokens)))
                one = PassTokens(
                    tokens=tokens[None],
                    chosen=np.arange(some.start - 1, some.stop - 1),
                    targets=tokens[some],
                    loss_indices=np.arange(some.start, some.stop),
                    temperatures=None,
                )
                logprobs[some] = log_softmax_of(model, one)[0].cpu().numpy()
                if likeliest_count:
                    places[some] = _likeliest(model, one, likeliest_count)
        return logprobs, places if likeliest_count else ()

    def _model(self, lora: Lora | None, *, seed: int = 0) -> CausalModel:
        if lora is None:
            return CausalModel(copy.deepcopy(self._module).requires_grad_(requires_grad=True))
        twin = twin_of(self._module)
        add_adapters(twin, lora, seed=seed)
        return CausalModel(twin)

    def _scorer(self, snapshot: Path | None) -> CausalModel:
        """Return a model with the weights of a snapshot; the last few are kept."""
        model = self._scorers.pop(snapshot, None) or self._read(snapshot)
        self._scorers[snapshot] = model
        while len(self._scorers) > _SCORER_COUNT:
            self._scorers.popitem(last=False)
        return model

    def _read(self, snapshot: Path | None) -> CausalModel:
        if snapshot is None:
            return CausalModel(twin_of(self._module))
        lora = lora_in(snapshot)
        if lora is None:
            return CausalModel(load_module(snapshot, device=self.settings.engine.device))
        model = self._model(lora)
        read_adapters(model.module, snapshot)
        return model


class Learner:
    """One model that is trained: gradients add up until a step uses them."""

    def __init__(
        self,
        model: CausalModel,
        lora: Lora | None,
        settings: TinkerSettings,
        *,
        max_context: int,
    ) -> None:
        """Train the parameters of a model that have gradients: adapters, or all (None)."""
        self._max_context = max_context
        self.lora = lora
        self._model = model
        self._settings = settings
        named = model.module.named_parameters()
        self._parameters = {name: each for name, each in named if each.requires_grad}
        self._adam = torch.optim.AdamW(list(self._parameters.values()), lr=0.0, fused=True)
        self._step_count = 0

    def forward_backward(self, request: TrainRequest) -> tuple[Sequence[np.ndarray], float]:
        """Add the gradient of a loss to those that wait for a step; a failure adds nothing.

        Returns:
            Log-probabilities of each datum's target_tokens, in their shape: f32[L] or f32[L, K];
            and the loss, the sum over all tokens.

        Raises:
            AstraflowError: INVALID_FIELD or CAPABILITY_MISSING for what cannot be computed,
                CONTEXT_TOO_LONG, MEMORY_EXCEEDED.
        """
        loss = find_loss(request.loss_fn, request.settings)
        batch = Batch.of(
            request.data,
            loss.inputs,
            vocab_size=self._model.vocabulary_size,
            max_context=self._max_context,
        )
        # Where the first input is 0 the loss is 0, whatever a model says.
        applies = batch.inputs[loss.inputs[0]] != 0
        found = np.zeros(len(batch.targets), np.float32)

        def learn(one: PassTokens) -> float:
            cells = batch.cells_of(one)
            live = np.flatnonzero(applies[cells])
            with torch.set_grad_enabled(bool(len(live)) and not request.forward_only):
                logprobs, _ = log_softmax_of(self._model, batch.targeted(one, cells))
                found[cells] = logprobs.detach().cpu().numpy()
                inputs = {
                    name: self._tensor(each[cells[live]]) for name, each in batch.inputs.items()
                }
                total = loss.formula(logprobs[self._tensor(live)], inputs, loss.settings)
                if total.requires_grad:
                    backward(total)
            return float(total.detach())

        with naming_exhaustion(max_tokens=self._settings.max_tokens_per_pass), self._adding():
            plan = self._planner.plan(batch.rows, np.ones(batch.rows.row_count, np.bool_))
            total = sum(learn(PassTokens.of(batch.rows, one)) for one in plan)
        return batch.divided(found), total

    def optim_step(self, params: AdamParams) -> Mapping[str, float]:
        """Change the weights by the gradients that have added up, and forget these.

        Without gradients nothing changes.

        Raises:
            AstraflowError: INVALID_FIELD when a gradient is not finite; the weights stay, and the
                gradients are forgotten.
        """
        parameters = list(self._parameters.values())
        found = nn.utils.clip_grad_norm_(parameters, params.grad_clip_norm or inf)
        norm = float(found)
        if not isfinite(norm):
            self._adam.zero_grad(set_to_none=True)
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the norm of the gradient is {norm}, not finite: the weights are as they were and "
                "the gradients are dropped; look at the weights, advantages and logprobs sent",
            )
        for group in self._adam.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        tensors.step(self._adam)
        self._step_count += 1
        return {"grad_norm": norm}

    def save(self, directory: Path, *, with_optimizer: bool) -> None:
        """Write the weights into an empty directory: adapters as peft has them, or the model."""
        adapters = adapter_settings(self._model.module)
        if adapters is None:
            write_model(self._model.module, directory, companions_of=self._settings.model_dir)
        else:
            write_adapters(self._model.module, adapters, directory)
        if with_optimizer:
            state = {"step_count": self._step_count, **self._adam.state_dict()}
            torch.save(state, directory / OPTIMIZER_FILE)

    def load(self, directory: Path, *, with_optimizer: bool) -> None:
        """Go on from what `save` wrote; gradients that wait for a step are dropped.

        Raises:
            AstraflowError: INVALID_FIELD for a directory of other weights, or without the
                optimizer's state.
        """
        if lora_in(directory) != self.lora:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                "the checkpoint is of another rank, or of other layers: create the model from it",
            )
        state = read_state(directory, self._parameters, {}) if with_optimizer else None
        if self.lora is not None:
            read_adapters(self._model.module, directory)
        else:
            saved = load_module(directory, device=self._settings.engine.device)
            self._model.module.load_state_dict(saved.state_dict())
        self._adam = torch.optim.AdamW(list(self._parameters.values()), lr=0.0, fused=True)
        self._adam.zero_grad(set_to_none=True)
        self._step_count = 0
        if state is not None:
            own = self._adam.state_dict()["param_groups"]
            self._adam.load_state_dict({"state": state["state"], "param_groups": own})
            self._step_count = state["step_count"]

    @cached_property
    def _planner(self) -> PassPlanner:
        tokens = self._settings.max_tokens_per_pass
        return PassPlanner([self._model], max_tokens=tokens, share_prefixes="auto", packing="auto")

    @contextmanager
    def _adding(self) -> Generator[None]:
        """Add what a block makes to the gradients before it; a block that fails adds nothing."""
        before = {name: each.grad for name, each in self._parameters.items()}
        for each in self._parameters.values():
            each.grad = None
        try:
            yield
        except BaseException:
            for name, each in self._parameters.items():
                each.grad = before[name]
            raise
        for name, each in self._parameters.items():
            held = before[name]
            if held is not None:
                each.grad = held if each.grad is None else held.add_(each.grad)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return to_tensor(values, self._model.device)


def lora_in(directory: Path) -> Lora | None:
    """Return the settings of the adapters in a directory; None: it has all of a model."""
    return read_lora(directory) if (directory / CONFIG_FILE).is_file() else None


def _likeliest(model: CausalModel, one: PassTokens, count: int) -> list[Likeliest]:
    chosen = to_tensor(one.chosen, model.device)
    logits = model.logits(to_tensor(one.tokens, model.device), chosen).float()
    found = logits.log_softmax(-1).topk(min(count, logits.shape[-1]))
    tokens: list[list[int]] = found.indices.cpu().numpy().tolist()
    values: list[list[float]] = found.values.cpu().numpy().tolist()
    return [list(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
