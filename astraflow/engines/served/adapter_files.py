"""Adapters of a model as a server reads them: what belongs to one, and its files."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from astraflow.config.lora import CONFIG_FILE, TENSOR_FILE, Lora, tensor_name
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import TensorUpdate, WeightUpdate
from astraflow.engines.served.model import Model
from astraflow.storage.weight_files import write_weights

Tensors = Mapping[str, TensorUpdate]
"""Whole tensors by name."""

_MATRIX = 2


def adapter_model(model: Model, settings: Lora) -> Model:
    """Return a model whose tensors are the adapters beside its layers, and nothing else.

    Linear layers are known by their shapes: what has a row for each token of the vocabulary is
    the embedding or the output layer.

    Raises:
        AstraflowError: INVALID_FIELD for targets that are no linear layers of the model.
    """
    layers = {
        name.removesuffix(".weight"): shape
        for name, shape in model.shapes.items()
        if name.endswith(".weight") and len(shape) == _MATRIX and shape[0] != model.vocab_size
    }
    known = {_last(path) for path in layers}
    missing = set(settings.targets) - known
    if missing or not layers:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"model.lora.targets: {model.directory} has no linear layer"
            f" {', '.join(sorted(missing))} to adapt; it has {', '.join(sorted(known)) or 'none'}",
        )
    if not settings.targets and any(".experts." in path for path in layers):
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"model.lora.targets: {model.directory} has experts, and a server adapts those layers"
            " that are named; name them, such as q_proj and v_proj",
        )
    shapes = {
        name: shape
        for path, (rows, columns) in layers.items()
        if not settings.targets or _last(path) in settings.targets
        for name, shape in (
            (tensor_name(f"{path}.lora_A.weight"), (settings.rank, columns)),
            (tensor_name(f"{path}.lora_B.weight"), (rows, settings.rank)),
        )
    }
    return replace(model, shapes=shapes)


def targets_of(tensors: Iterable[str]) -> tuple[str, ...]:
    """Return the layers that some tensors of adapters are beside, by the last part of their names.

    Example:
        >>> targets_of(["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"])
        ('up_proj',)
    """
    return tuple(sorted({_last(name.partition(".lora_")[0]) for name in tensors}))


def changed(held: Tensors, update: WeightUpdate) -> Tensors:
    """Return what an update makes of the tensors that are held, which stay as they are.

    Args:
        held: Of the update's base.
        update: Checked against the layout.
    """
    return {**held, **{part.spec.name: _whole(part, held) for part in update.tensors}}


def write_adapter(folder: Path, tensors: Tensors, settings: Lora, *, base: Path) -> None:
    """Write an adapter into a folder of its own, in the files of peft.

    Args:
        folder: Made here.
        tensors: All of the adapter.
        settings: Of the recipe.
        base: Model that it belongs to.
    """
    said = settings.as_peft(base=str(base), targets=targets_of(tensors))
    write_weights(folder / TENSOR_FILE, tuple(tensors.values()))
    (folder / CONFIG_FILE).write_text(json.dumps(said))


def _whole(part: TensorUpdate, held: Tensors) -> TensorUpdate:
    if part.indices is None:
        return part
    values = held[part.spec.name].values.reshape(-1).copy()
    values[part.indices] = part.values
    return replace(part, indices=None, values=values)


def _last(path: str) -> str:
    return path.rpartition(".")[2]
