"""Adapters of a model as a server reads them, and the versions of them that it has."""

import asyncio
import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from astraflow.config.lora import (
    CONFIG_FILE,
    TENSOR_FILE,
    Lora,
    is_target,
    last_name,
    require_targets,
    tensor_name,
)
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import TensorUpdate, WeightUpdate
from astraflow.engines.served.model import ModelDescription
from astraflow.engines.served.server import Life
from astraflow.storage.weight_files import write_weights

Tensors = Mapping[str, TensorUpdate]

"""Whole tensors by name."""

_MATRIX = 2


def adapter_model(model: ModelDescription, settings: Lora) -> ModelDescription:
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
    require_targets(settings, layers, of=str(model.directory))
    if not settings.targets and any(".experts." in path for path in layers):
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"model.lora.targets: {model.directory} has experts, and a server adapts those layers"
            " that are named; name them, such as q_proj and v_proj",
        )
    shapes = {
        name: shape
        for path, (rows, columns) in layers.items()
        if is_target(path, settings)
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
    return tuple(sorted({last_name(name.partition(".lora_")[0]) for name in tensors}))


def changed(held: Tensors, update: WeightUpdate) -> Tensors:
    """Return what an update makes of the tensors that are held, which stay as they are."""
    return {**held, **{part.spec.name: _whole_tensor(part, held) for part in update.tensors}}


def write_adapter(folder: Path, tensors: Tensors, settings: Lora, *, base: Path) -> None:
    """Write an adapter into a new folder, in the files of peft."""
    said = settings.as_peft(base=str(base), targets=targets_of(tensors))
    write_weights(folder / TENSOR_FILE, tuple(tensors.values()))
    (folder / CONFIG_FILE).write_text(json.dumps(said))


def _whole_tensor(part: TensorUpdate, held: Tensors) -> TensorUpdate:
    if part.indices is None:
        return part
    values = held[part.spec.name].values.reshape(-1).copy()
    values[part.indices] = part.values
    return replace(part, indices=None, values=values)


@dataclass(slots=True, kw_only=True, eq=False)
class Adapter:
    """One version.

    Attributes:
        version: Of the policy.
        name: In the server.
        life: Of the server that has it.
        user_count: Generations and pins.
    """

    version: int
    name: str
    folder: Path
    life: Life
    user_count: int = 0


class AdapterVersions:
    """Keeps a version for as long as it is live, pinned or sampled with; then it is let go.

    Attributes:
        live: What is sampled with; None before the first.
        kept: All that the server has, oldest first.
    """

    def __init__(self, place_count: int, let_go: Callable[[Adapter], object]) -> None:
        """Keep nothing; `let_go` is told of one that nobody needs, and `forget` frees its place."""
        self.live: Adapter | None = None
        self.kept: tuple[Adapter, ...] = ()
        self._pins: list[Adapter] = []
        self._place_count = place_count
        self._let_go = let_go
        self._freed = asyncio.Event()

    @property
    def pinned_versions(self) -> frozenset[int]:
        return frozenset(adapter.version for adapter in self._pins)

    async def wait_free(self) -> None:
        while len(self.kept) >= self._place_count:
            self._freed.clear()
            await self._freed.wait()

    def put(self, adapter: Adapter) -> None:
        """Make a version live; the one before ends with what samples with it."""
        before, self.live = self.live, adapter
        self.kept = (*self.kept, adapter)
        if before is not None:
            self._release_unused(before)

    def forget(self, adapter: Adapter) -> None:
        self.kept = tuple(kept for kept in self.kept if kept is not adapter)
        self._freed.set()

    @contextmanager
    def using(self, version: int | None, life: Life) -> Generator[Adapter]:
        """Sample with a version during the body; None: the live one.

        Raises:
            AstraflowError: VERSION_NOT_SERVED.
        """
        adapter = self._take(version, life)
        try:
            yield adapter
        finally:
            self._drop(adapter)

    def pin(self, version: int, life: Life) -> None:
        """Keep a version that is live or pinned.

        Raises:
            AstraflowError: VERSION_NOT_SERVED.
        """
        self._pins.append(self._take(version, life))

    def unpin(self, version: int) -> None:
        pinned = next((each for each in self._pins if each.version == version), None)
        if pinned is not None:
            self._pins.remove(pinned)
            self._drop(pinned)

    def _take(self, version: int | None, life: Life) -> Adapter:
        candidates = (self.live, *(self._pins if version is not None else ()))
        for adapter in candidates:
            if adapter and adapter.life is life and version in (None, adapter.version):
                adapter.user_count += 1
                return adapter
        wanted = "no version" if version is None else f"version {version} is not"
        raise AstraflowError(
            Reason.VERSION_NOT_SERVED, f"{wanted} served by the engine now", retryable=True
        )

    def _drop(self, adapter: Adapter) -> None:
        adapter.user_count -= 1
        self._release_unused(adapter)

    def _release_unused(self, adapter: Adapter) -> None:
        if not adapter.user_count and adapter is not self.live:
            self._let_go(adapter)
