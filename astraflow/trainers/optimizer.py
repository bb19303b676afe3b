"""Steps on fp32 master weights: rising rate, clipped gradients, no step on a NaN; and files."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Final, cast
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor, nn

from astraflow.config.recipe import Optimizer
from astraflow.core.code import load
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.modules import SCORE
from astraflow.trainers import tensors
from astraflow.trainers.checkpoints import OPTIMIZER_DIR, OPTIMIZER_FILE
from astraflow.trainers.engine import guarded

# Of the learning rate, after a decay; `config.recipe.Optimizer.decay` says so to the user.
_LEAST_SHARE = 0.1


class WeightOptimizer:
    """Makes steps from the gradients that have added up.

    AdamW is arXiv 1711.05101, algorithm 2; Muon is torch.optim.Muon (Jordan et al., "Muon: an
    optimizer for hidden layers in neural networks", 2024), its update scaled to the size of
    AdamW's (arXiv 2502.16982, section 2.2).
    """

    def __init__(self, module: nn.Module, settings: Optimizer) -> None:
        """Begin with no state; change those parameters that require a gradient.

        Raises:
            AstraflowError: CODE_UNKNOWN when the settings name code that is not here, INVALID_FIELD
                when that makes no optimizer of these parameters.
        """
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._parameters = [*named.values()]
        self._alike = _alike(self._parameters)
        self._settings = settings
        if settings.kind == "adamw":
            self._parts = [_adamw(self._parameters, settings)]
        elif settings.kind == "muon":
            self._parts = _muon(module, named, settings)
        else:
            self._parts = [_own(named, settings)]
        # Groups of an optimizer of the user's may have rates of their own, in proportion.
        self._shares = [group["lr"] / settings.learning_rate for group in self._groups]
        self._begun = [dict(group) for group in self._groups]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Those of all parts; torch makes them anew when a state is loaded."""
        return [group for part in self._parts for group in part.param_groups]

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        share = min(1.0, step / max(1, self._settings.warm_up_steps))
        if self._settings.decay is not None:
            first, last = self._settings.decay
            done = min(1.0, max(0.0, (step - first) / (last - first)))
            share *= 1.0 - (1.0 - _LEAST_SHARE) * done
        return self._settings.learning_rate * share

    def step(self, step: int) -> float:
        """Change the weights, forget the gradients and return their norm before clipping.

        Raises:
            AstraflowError: INTERNAL when a gradient is not finite; the weights stay.
        """
        norm = self.clip(step)
        self.apply(step)
        return norm

    def clip(self, step: int) -> float:
        """Clip the gradients that have added up, and return their norm before.

        Raises:
            AstraflowError: INTERNAL when one is not finite; they are forgotten.
        """
        # However they are cut.
        groups = [[each.grad for each in some if each.grad is not None] for some in self._alike]
        norms = [tensors.whole(nn.utils.get_total_norm(some)) for some in groups if some]
        total = torch.stack(norms).square().sum().sqrt() if norms else torch.zeros(())
        for some in self._alike:
            nn.utils.clip_grads_with_norm_(some, self._settings.max_grad_norm, total)
        norm = float(total)
        if not isfinite(norm):
            self.forget()
            raise AstraflowError(
                Reason.INTERNAL,
                f"step {step}: the norm of the gradient is {norm}, not finite; the weights "
                f"are those of step {step - 1}. Lower trainer.optimizer.learning_rate or "
                "max_grad_norm, and look at mismatch/logp_abs_max and train/ratio_max of the steps "
                "before",
            )
        return norm

    def apply(self, step: int) -> None:
        """Change the weights by the gradients, and forget these."""
        for group, share in zip(self._groups, self._shares, strict=True):
            group["lr"] = self.rate(step) * share
        for part in self._parts:
            tensors.step(part)

    def forget(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    @contextmanager
    def gathering(self) -> Generator[None]:
        """Let gradients add up; a block that fails leaves none behind."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def state(self) -> Mapping[str, Any]:
        """Return what the next step depends on beside weights and gradients.

        Fields of each parameter, by its index among those that are changed; and those numbers of
        each group that steps have changed, as some optimizers of users keep their state there.
        """
        places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        found = {
            places[id(parameter)]: dict(fields)
            for part in self._parts
            for parameter, fields in part.state.items()
        }
        groups = [*map(_changed, self._begun, self._groups)]
        return {
            "state": {index: found[index] for index in sorted(found)},
            **({_GROUPS: groups} if any(groups) else {}),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; learning rate and decay stay those of the settings.

        Raises:
            AstraflowError: INVALID_FIELD when it is that of another kind of optimizer.
        """
        found: Mapping[int, Mapping[str, Any]] = state["state"]
        places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for part in self._parts:
            changed = [each for group in part.param_groups for each in group["params"]]
            indices = [places[id(each)] for each in changed]
            own = {at: found[index] for at, index in enumerate(indices) if index in found}
            needed = _NEEDED.get(type(part))
            if needed and any(needed not in fields for fields in own.values()):
                raise AstraflowError(
                    Reason.INVALID_FIELD,
                    f"the checkpoint is of another kind of optimizer than {self._settings.kind}; "
                    "go on with that one, or start a run from these weights",
                )
            groups = part.state_dict()["param_groups"]
            # Of an optimizer of a user's, which is the only part.
            for group, numbers in zip(groups, state.get(_GROUPS, ()), strict=False):
                group.update(numbers)
            part.load_state_dict({"state": own, "param_groups": groups})


def _changed(begun: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return those numbers of a group that are not as it began, but for its rate."""
    numbers = {
        name: value for name, value in group.items() if isinstance(value, Tensor | int | float)
    }
    return {
        name: value
        for name, value in numbers.items()
        if name != "lr" and (isinstance(value, Tensor) or value != begun.get(name))
    }


_NEEDED: Final[Mapping[type[torch.optim.Optimizer], str]] = {
    torch.optim.AdamW: "exp_avg",
    torch.optim.Muon: "momentum_buffer",
}


def _alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return those together that are cut over the same ranks, whose sums can be made at once."""
    groups: dict[object, list[nn.Parameter]] = {}
    for each in parameters:
        groups.setdefault(getattr(each, "device_mesh", None), []).append(each)
    return [*groups.values()]


def _adamw(parameters: Iterable[nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": some} for some in _alike(parameters)],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        # One pass over the weights instead of a dozen.
        fused=True,
    )


def _muon(
    module: nn.Module, named: Mapping[str, nn.Parameter], settings: Optimizer
) -> list[torch.optim.Optimizer]:
    """Return Muon for hidden matrices, and AdamW for embeddings, the output layer and vectors."""
    ends = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    head: Any = getattr(module, SCORE, None)
    head = head or getattr(module, "get_output_embeddings", lambda: None)()
    ends |= {id(each) for each in head.parameters()} if head is not None else set()
    hidden = {name for name, p in named.items() if p.ndim == 2 and id(p) not in ends}
    parts: list[torch.optim.Optimizer] = []
    if hidden:
        muon = torch.optim.Muon(
            [named[name] for name in named if name in hidden],
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        parts.append(muon)
    rest = [named[name] for name in named if name not in hidden]
    return [*parts, _adamw(rest, settings)] if rest else parts


def _own(named: Mapping[str, nn.Parameter], settings: Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe's function, once it is one of these parameters."""
    what = f"optimizer.kind {settings.kind}"
    make = load(settings.kind, what=what)
    made: Any = guarded(lambda: make(dict(named), settings), what)
    known = {id(each) for each in named.values()}
    if not isinstance(made, torch.optim.Optimizer):
        problem = f"returned {type(made).__name__}, not a torch.optim.Optimizer"
    elif any(id(p) not in known for group in made.param_groups for p in group["params"]):
        problem = "returned an optimizer of other tensors than the parameters that it was given"
    elif "lr" not in made.param_groups[0]:
        problem = "returned an optimizer whose groups have no 'lr', which schedules set"
    else:
        return made
    raise AstraflowError(Reason.INVALID_FIELD, f"{what} {problem}")


def try_own_optimizer(settings: Optimizer) -> None:
    """Make a step of a small layer, if the optimizer is of the user's own making.

    Raises:
        AstraflowError: As `WeightOptimizer` does; INVALID_FIELD when the step raises.
    """
    if ":" not in settings.kind:
        return
    layer = nn.Linear(4, 3)
    optimizer = WeightOptimizer(layer, settings)
    for each in layer.parameters():
        each.grad = torch.ones_like(each)
    guarded(lambda: optimizer.step(1), f"optimizer.kind {settings.kind}")


_STEP_COUNT: Final = "step_count"

_GROUPS: Final = "param_groups"

_CRITIC: Final = "critic"

# Beside its moments lies every weight of a critic: no model file has it.
_WEIGHT: Final = "value"

Fields = Mapping[int, Mapping[str, Tensor]]


def flat_state(state: Mapping[str, Any], names: list[str], critic: list[str]) -> dict[str, Tensor]:
    """Return a state by the names of its parameters, as torch.distributed.checkpoint takes it.

    Args:
        state: As `PolicyLearner.state` returns it.
        names: Of the parameters, in the optimizer's order.
        critic: Of those of the critic, in its optimizer's order.
    """
    count = torch.tensor(state[_STEP_COUNT], dtype=torch.int64)
    flat = {_STEP_COUNT: count, **_flat(state, names)}
    if _CRITIC not in state:
        return flat
    weights, moments = state[_CRITIC]["weights"], state[_CRITIC]["optimizer"]
    parts = {f"{name}.{_WEIGHT}": each for name, each in weights.items()} | _flat(moments, critic)
    return flat | {f"{_CRITIC}.{key}": each for key, each in parts.items()}


def _flat(state: Mapping[str, Any], names: list[str]) -> dict[str, Tensor]:
    fields: Fields = state["state"]
    places = {names[index]: each for index, each in fields.items()}
    # No name of a parameter has a slash.
    places |= {f"{_GROUPS}/{i}": each for i, each in enumerate(state.get(_GROUPS, ()))}
    return {
        f"{place}.{field}": each for place, some in places.items() for field, each in some.items()
    }


def read_state(
    checkpoint: Path, parameters: Mapping[str, Tensor], critic: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return what `PolicyLearner.state` returned before; tensors are cut as the parameters are.

    Args:
        checkpoint: Of this or another number of ranks.
        parameters: In the optimizer's order; all ranks that share them call this.
        critic: Its parameters, likewise; none: there is no critic.

    Raises:
        AstraflowError: INVALID_FIELD when the checkpoint has no such state.
    """
    folder = checkpoint / OPTIMIZER_DIR
    source = folder if folder.is_dir() else checkpoint / OPTIMIZER_FILE
    try:
        read = _from_folder if source == folder else _from_file
        state = read(source, parameters, critic)
    except Exception as error:  # a torn file raises whatever its bytes lead to
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{source} cannot be read as the state of an optimizer: {error}",
        ) from error
    if critic and _CRITIC not in state:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{source} has no critic; leave out trainer.critic, or start a run from these weights",
        )
    return state


def _from_file(
    path: Path, parameters: Mapping[str, Tensor], critic: Mapping[str, Tensor]
) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    _cut(state["state"], list(parameters.values()))
    if critic and _CRITIC in state:
        _cut(state[_CRITIC]["optimizer"]["state"], list(critic.values()))
        weights: dict[str, Tensor] = state[_CRITIC]["weights"]
        weights |= {name: _cut_as(each, weights[name]) for name, each in critic.items()}
    return state


def _cut(places: dict[int, dict[str, Tensor]], parameters: list[Tensor]) -> None:
    """Keep what lies here of moments, by index of their parameter."""
    for index, fields in places.items():
        for field, value in fields.items():
            fields[field] = _cut_as(parameters[index], value)


def _from_folder(
    folder: Path, parameters: Mapping[str, Tensor], critic: Mapping[str, Tensor]
) -> dict[str, Any]:
    import torch.distributed.checkpoint  # noqa: PLC0415 - slow to import

    dcp = cast("Any", torch.distributed.checkpoint)
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    rooms = {**parameters, **{f"{_CRITIC}.{name}": each for name, each in critic.items()}}
    keys = [key for key in found if critic or not key.startswith(f"{_CRITIC}.")]
    flat: dict[str, Any] = {key: _empty_tensor(key, found[key], rooms) for key in keys}
    with catch_warnings():
        # That one process reads for itself is meant.
        filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(flat, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())
    count = int(flat.pop(_STEP_COUNT))
    of_critic = {key: flat.pop(key) for key in keys if key.startswith(f"{_CRITIC}.")}
    state = {_STEP_COUNT: count, **_indexed(flat, list(parameters))}
    return {**state, _CRITIC: _critic_of(of_critic, list(critic))} if of_critic else state


def _critic_of(flat: Mapping[str, Tensor], names: list[str]) -> dict[str, Any]:
    parts = {key.removeprefix(f"{_CRITIC}."): each for key, each in flat.items()}
    ending = f".{_WEIGHT}"
    weights = {key: parts.pop(key) for key in [*parts] if key.endswith(ending)}
    return {
        "weights": {key.removesuffix(ending): each for key, each in weights.items()},
        "optimizer": _indexed(parts, names),
    }


def _indexed(flat: Mapping[str, Tensor], names: list[str]) -> dict[str, Any]:
    """Return fields by the index of their parameter or group, as `WeightOptimizer.state` does."""
    places = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    groups: dict[int, dict[str, Tensor]] = {}
    for key, value in flat.items():
        name, field = key.rsplit(".", 1)
        if name in places:
            state.setdefault(places[name], {})[field] = value
        else:
            groups.setdefault(int(name.removeprefix(f"{_GROUPS}/")), {})[field] = value
    return {
        "state": state,
        _GROUPS: [groups.get(i, {}) for i in range(max(groups, default=-1) + 1)],
    }


def _empty_tensor(key: str, stored: Any, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """Return where a tensor of the state is read into: cut as its parameter is.

    None: it is a number or the like, as optimizers of a user's may have them, and is read as such.
    """
    if not hasattr(stored, "size"):
        return None
    parameter = parameters.get(key.rsplit(".", 1)[0])
    if parameter is not None and stored.size == parameter.shape and stored.size:
        return torch.zeros_like(parameter)
    return torch.zeros(stored.size, dtype=stored.properties.dtype)


def _cut_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Return the part of a whole tensor that lies here of a parameter; anything else as it is."""
    if not hasattr(parameter, "to_local") or getattr(value, "shape", None) != parameter.shape:
        return value
    cut = torch.empty_like(parameter, dtype=value.dtype)
    tensors.local(cut).copy_(tensors.part_of(value, parameter))
    return cut
