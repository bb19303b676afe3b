"""Stagers: updates of one model, staged beside generation and applied when it pauses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .exchange import Update, read_update
from .patching import Patcher, StagedUpdate, apply, values_of
from .regions import Loader, Parameters

_PLAIN = frozenset(("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"))


class Stager:
    """Stages one update at a time in a thread of its own."""

    def __init__(
        self,
        *,
        parameters: Callable[[], Parameters],
        load: Loader,
        reload: Callable[[Update], None],
    ) -> None:
        """Take what a server does to a model; `reload` loads a whole checkpoint as at its start."""
        self._parameters = parameters
        self._load = load
        self._reload = reload
        self._patcher: Patcher | None = None
        self._staging: Staging | None = None
        self._report: dict[str, Any] = {}

    def begin(self, path: str) -> None:
        """Begin to stage a file."""
        if self._staging is not None:
            self._staging.join()
        if self._patcher is None:
            self._patcher = Patcher(self._parameters(), self._load)
        self._staging = Staging(path, self._patcher)
        self._staging.start()

    def progress(self, path: str) -> dict[str, Any]:
        """Return whether a file is staged, and what is wrong with it."""
        staging = self._staging
        if staging is None or staging.path != path:
            return {"is_staged": False, "error": f"{path} was not begun"}
        if staging.is_alive():
            return {"is_staged": False, "error": ""}
        error = "" if staging.error is None else f"{type(staging.error).__name__}: {staging.error}"
        return {"is_staged": staging.error is None, "error": error}

    def staged(self, path: str) -> str:
        """Stage a file, and return what is wrong with it; empty: nothing."""
        self.begin(path)
        staging = self._staging
        if staging is not None:
            staging.join()
        return str(self.progress(path)["error"])

    @property
    def ready(self) -> Staging | None:
        """What is staged, if no tensor of it has to be reloaded."""
        staging = self._staging
        if staging is None or staging.is_alive() or staging.staged is None:
            return None
        return None if staging.staged.unmapped else staging

    def apply(self, path: str) -> None:
        """Write a file into the live weights.

        Raises:
            Exception: Whatever it was: the weights are of no version.
        """
        if self._staging is None or self._staging.path != path:
            self.begin(path)
        update, staged = self._taken()
        if staged.unmapped:
            self._reload(update)
            self._patcher = None
            nbytes = sum(part.values.nbytes for part in update.parts)
            self._report = {"version": update.version, "nbytes": nbytes, "apply_s": 0.0}
        else:
            self._report = apply(staged)

    def report(self) -> dict[str, Any]:
        """Return what the last update did."""
        return self._report

    def _taken(self) -> tuple[Update, StagedUpdate]:
        staging, self._staging = self._staging, None
        assert staging is not None  # noqa: S101  begun above
        staging.join()
        if staging.error is not None:
            raise staging.error
        assert staging.staged is not None and staging.update is not None  # noqa: S101, PT018
        return staging.update, staging.staged


class Staging(threading.Thread):
    """Stages one file."""

    def __init__(self, path: str, patcher: Patcher) -> None:
        super().__init__(name="astraflow-staging", daemon=True)
        self.path = path
        self.update: Update | None = None
        self.staged: StagedUpdate | None = None
        self.error: Exception | None = None
        self._patcher = patcher

    def run(self) -> None:
        """Read and look up."""
        try:
            self.update = read_update(self.path)
            self.staged = self._patcher.stage(self.update)
        except Exception as error:  # noqa: BLE001  told to who asks
            self.error = error


_STAGERS: WeakKeyDictionary[torch.nn.Module, Stager] = WeakKeyDictionary()


def stager_of(model: Any, reload: Callable[[Update], None]) -> Stager:
    """Return the one stager of a model."""
    if model not in _STAGERS:
        _STAGERS[model] = Stager(
            parameters=lambda: Parameters(_plain(model)),
            load=model.load_weights,
            reload=reload,
        )
    return _STAGERS[model]


def load_by_name(model: Any, update: Update) -> None:
    """Give all tensors of an update to the model's own loader."""
    with torch.no_grad():
        model.load_weights((p.name, values_of(p).reshape(p.shape)) for p in update.parts)


def _plain(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters that are computed with as they were loaded."""
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or type(method).__name__ in _PLAIN:
            yield from module.named_parameters(prefix, recurse=False)
