"""Stagers: updates of one model, staged beside generation and applied when it pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .exchange import Update, read_update
from .patching import Patcher, StagedUpdate, apply, values_of
from .regions import Parameters

_PLAIN = frozenset(("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"))
_SAMPLE_COUNT = 64


class Stager:
    """Stages one update at a time in a thread of its own.

    Layers that are not known to compute with what was loaded, such as experts, are loaded whole by
    the server once. Where a sample of the values is then found in its place, nothing was packed or
    scaled, and from then on they are patched as all others.
    """

    def __init__(self, model: Any, reload: Callable[[Update], None]) -> None:
        """Take a server's model; `reload` loads a whole checkpoint as at its start."""
        self._model = model
        self._reload = reload
        self._patcher: Patcher | None = None
        self._proven = frozenset[str]()
        self._sample: Update | None = None
        self._thread = ThreadPoolExecutor(1, "astraflow-staging")
        self._path = ""
        self._staging: Future[tuple[Update, StagedUpdate]] | None = None

    def begin(self, path: str) -> Future[tuple[Update, StagedUpdate]]:
        if self._staging is not None:
            self._staging.exception()
        self._path, self._staging = path, self._thread.submit(self._staged, path)
        return self._staging

    def progress(self, path: str) -> dict[str, Any]:
        """Return whether a file is staged, and what is wrong with it."""
        if self._staging is None or self._path != path:
            return {"is_staged": False, "error": f"{path} was not begun"}
        if not self._staging.done():
            return {"is_staged": False, "error": ""}
        error = self._staging.exception()
        said = "" if error is None else f"{type(error).__name__}: {error}"
        return {"is_staged": error is None, "error": said}

    def staged(self, path: str) -> str:
        """Stage a file, and return what is wrong with it; empty: nothing."""
        self.begin(path).exception()
        return str(self.progress(path)["error"])

    @property
    def ready(self) -> tuple[str, StagedUpdate] | None:
        """The path and what is staged of it, if no tensor of it has to be reloaded."""
        if self._staging is None or not self._staging.done() or self._staging.exception():
            return None
        _, staged = self._staging.result()
        return None if staged.unmapped else (self._path, staged)

    def apply(self, path: str) -> dict[str, Any]:
        """Write a file into the live weights, and return what that did: see `patching.apply`.

        Raises:
            Exception: Whatever it was: the weights are of no version.
        """
        begun = self._staging if self._path == path else None
        staging, self._staging = begun or self.begin(path), None
        update, staged = staging.result()
        if not staged.unmapped:
            return apply(staged)
        self._reload(update)
        # The server may go on to pack what was loaded: it is looked at with the next update.
        self._patcher, self._sample = None, _sample_of(update)
        nbytes = sum(part.values.nbytes for part in update.parts)
        return {"version": update.version, "nbytes": nbytes, "apply_s": 0.0}

    def _staged(self, path: str) -> tuple[Update, StagedUpdate]:
        update = read_update(path)
        if self._patcher is None:
            self._patcher = self._new_patcher()
        return update, self._patcher.stage(update)

    def _new_patcher(self) -> Patcher:
        named, load = dict(self._model.named_parameters()), self._model.load_weights
        if self._sample is not None:
            self._proven |= Patcher(Parameters(named.items()), load).holders(self._sample)
            self._sample = None
        known = self._proven.union(_plain_names(self._model))
        return Patcher(Parameters(each for each in named.items() if each[0] in known), load)


def _sample_of(update: Update) -> Update:
    chance = np.random.default_rng(0)
    parts = (
        (part, np.unique(chance.integers(part.values.size, size=_SAMPLE_COUNT)))
        for part in update.parts
        if part.indices is None and part.values.size
    )
    return replace(
        update,
        parts=tuple(replace(p, indices=some, values=p.values[some]) for p, some in parts),
    )


_STAGERS: WeakKeyDictionary[torch.nn.Module, Stager] = WeakKeyDictionary()


def stager_of(model: Any, reload: Callable[[Update], None]) -> Stager:
    """Return the one stager of a model."""
    if model not in _STAGERS:
        _STAGERS[model] = Stager(model, reload)
    return _STAGERS[model]


def load_by_name(model: Any, update: Update) -> None:
    """Give all tensors of an update to the model's own loader."""
    with torch.no_grad():
        model.load_weights((p.name, values_of(p).reshape(p.shape)) for p in update.parts)


def _plain_names(model: Any) -> Iterator[str]:
    """Yield the parameters of layers that are known to compute with what was loaded."""
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or type(method).__name__ in _PLAIN:
            yield from (name for name, _ in module.named_parameters(prefix, recurse=False))
