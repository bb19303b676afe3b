"""Stagers: updates of one model, staged beside generation and applied when it pauses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._thread = ThreadPoolExecutor(1, "astraflow-staging")
        self._path = ""
        self._staging: Future[tuple[Update, StagedUpdate]] | None = None
        self._report: dict[str, Any] = {}

    def begin(self, path: str) -> None:
        """Begin to stage a file."""
        if self._staging is not None:
            self._staging.exception()
        if self._patcher is None:
            self._patcher = Patcher(self._parameters(), self._load)
        self._path, self._staging = path, self._thread.submit(_staged, path, self._patcher)

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
        self.begin(path)
        if self._staging is not None:
            self._staging.exception()
        return str(self.progress(path)["error"])

    @property
    def ready(self) -> tuple[str, StagedUpdate] | None:
        """The path and what is staged of it, if no tensor of it has to be reloaded."""
        if self._staging is None or not self._staging.done() or self._staging.exception():
            return None
        _, staged = self._staging.result()
        return None if staged.unmapped else (self._path, staged)

    def apply(self, path: str) -> None:
        """Write a file into the live weights.

        Raises:
            Exception: Whatever it was: the weights are of no version.
        """
        if self._staging is None or self._path != path:
            self.begin(path)
        staging, self._staging = self._staging, None
        assert staging is not None  # noqa: S101  begun above
        update, staged = staging.result()
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


def _staged(path: str, patcher: Patcher) -> tuple[Update, StagedUpdate]:
    update = read_update(path)
    return update, patcher.stage(update)


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
