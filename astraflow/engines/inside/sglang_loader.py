"""The weight loader that SGLang is started with, by `--custom-weight-loader`.

The server calls it in each rank, between two steps, with the model and what came by its own route
for tensors, of which only the name counts: it is the path of an exchange file. A server ends when
a loader raises, so what happened is written beside the file, an answer of each process:

    {"error": "", "version": 7, "nbytes": 4096, "apply_s": 0.001}

From the first update on, `Door` lets the node have the next ones staged beside generation, and
`sglang_plugin` writes them without the route.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from .desk import Desk
from .door import Door
from .live import desk_of, load_by_name

_DOORS: set[Path] = set()


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Apply the exchange file that the only tensor is named after.

    Args:
        model: Of the server.
        named_tensors: One, of any value.
    """
    ((path, _),) = named_tensors
    desk = desk_in(model)
    _open_door(Path(path).parent, desk)
    applied(desk, path)


def desk_in(model: Any) -> Desk:
    """Return the desk of a model of SGLang."""
    # What is not simply copied is finished by the server when its session ends.
    return desk_of(model, partial(load_by_name, model))


def applied(desk: Desk, path: str) -> str:
    """Apply a file, and write beside it what happened; return the error, or nothing."""
    answer: dict[str, Any] = {"error": ""}
    try:
        desk.apply(path)
        answer |= desk.said()
    except Exception as error:  # noqa: BLE001  raised, it would end the server and say nothing
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    draft = Path(f"{path}.{os.getpid()}.draft")
    draft.write_text(json.dumps(answer))
    draft.rename(draft.with_suffix(".answer"))
    return str(answer["error"])


def _open_door(folder: Path, desk: Desk) -> None:
    """Open one in each folder that files come from: of a node, and of the next one."""
    path = folder / f"{os.getpid()}.door"
    if path in _DOORS:
        return
    # Without one, files come by the route alone: it is not worth the server.
    with suppress(OSError):
        Door(path, desk, is_hooked=_is_hooked()).start()
        _DOORS.add(path)


def _is_hooked() -> bool:
    """Return whether this server took `sglang_plugin`: releases without its target go without."""
    scheduler: Any = getattr(sys.modules.get("sglang.srt.managers.scheduler"), "Scheduler", None)
    return hasattr(getattr(scheduler, "handle_update_weight_version", None), "__wrapped__")
