"""The process of environments: plays what it is told in lines of JSON, one line at a time.

A script of its own, `python worker.py FD PACKAGES NAME OPTIONS`, for any interpreter: it needs the
standard library, and whatever the environment needs. Of astraflow only modules without
dependencies can be imported here. A line names a slot, an environment of its own that stays; what
is answered is a line, too.
"""

import json
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from sysconfig import get_path
from typing import Any

_SHOWN_FRAMES, _SHOWN_CHARS = 10, 4000


class OwnPackage:
    """Finds astraflow where the node has it, and nothing else that lies beside it."""

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where the package is; its modules are found by its own path."""
        del path, target
        return PathFinder.find_spec(name, [self._root]) if name == "astraflow" else None


class EnvironmentSlot:
    """An environment, and the random numbers that are its own."""

    def __init__(self, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._make = make
        self._options = options
        self._environment: Any = None
        self._random = random.getstate()
        self._numpy: Any = None

    def make(self) -> None:
        """Make the environment, unless there is one."""
        if self._environment is None:
            self._environment = self._make(**self._options)

    def call(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a line says, and return the answer."""
        random.setstate(self._random)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        try:
            self.make()
            return self._answer(asked)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment raises anything
            self.drop()
            return describe(error)
        finally:
            self._random = random.getstate()
            numpy = sys.modules.get("numpy")
            self._numpy = None if numpy is None else numpy.random.get_state()

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        if "action" not in asked:
            seed = asked["seed"]
            random.seed(seed)
            numpy = sys.modules.get("numpy")
            if numpy is not None:
                numpy.random.seed(seed % 2**32)
            return {"observation": self._environment.reset(asked["task"], seed)}
        step = self._environment.step(asked["action"])
        if not hasattr(step, "is_done"):
            raise TypeError(f"step returned {type(step).__name__}, not a Step")
        return {
            "observation": step.observation,
            "reward": float(step.reward),
            "is_done": bool(step.is_done),
            "metrics": {str(name): float(value) for name, value in step.metrics.items()},
        }

    def drop(self) -> None:
        """Close the environment, whatever it says to that; the next reset makes another."""
        environment, self._environment = self._environment, None
        try:
            if environment is not None:
                environment.close()
        except Exception:  # noqa: BLE001 - it is let go of in any case
            traceback.print_exc()


def describe(error: BaseException) -> dict[str, str]:
    """Return what was raised: a line, what equal errors have in common, and the traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    said = f"{type(error).__name__}: {error}"
    if not frames:
        return {"error": said, "cause": "", "traceback": said}
    at = next((frame for frame in reversed(frames) if is_users(frame.filename)), frames[-1])
    place = f"{Path(at.filename).name}:{at.lineno}"
    last = frames[: frames.index(at) + 1][-_SHOWN_FRAMES:]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(last), said]
    return {
        "error": f"{said} ({place}, in {at.name})",
        "cause": f"{type(error).__name__} at {place}",
        "traceback": "".join(lines)[-_SHOWN_CHARS:],
    }


def is_users(filename: str) -> bool:
    """Whether a file is neither of Python nor of a package that is installed."""
    parts = Path(filename).parts
    own = get_path("stdlib")
    return not ("site-packages" in parts or filename.startswith((own, "<")))


def find(name: str) -> Callable[..., Any]:
    """Return what makes the environments of a name: module:attribute or an entry point.

    Raises:
        LookupError: There is nothing of that name here.
    """
    target = name
    if ":" not in name:
        known = {point.name: point.value for point in entry_points(group="astraflow.environments")}
        if name not in known:
            raise LookupError(
                f"'{name}' is no environment that is installed in {sys.executable}; there are "
                f"{', '.join(sorted(known)) or 'none'} besides the built-in ones"
            )
        target = known[name]
    module, _, attribute = target.partition(":")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def serve(line: Any, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Make an environment and say so; answer until the owner hangs up, then close all."""
    slots = {0: EnvironmentSlot(make, options)}
    slots[0].make()
    line.write(b"{}\n")
    line.flush()
    for asked in line:
        told = json.loads(asked)
        number = told["slot"]
        if number not in slots:
            slots[number] = EnvironmentSlot(make, options)
        slot = slots[number]
        answer = slot.call(told)
        try:
            said = json.dumps(answer)
        except (TypeError, ValueError) as error:
            slot.drop()
            said = json.dumps({"error": f"what it gave is not JSON: {error}"})
        line.write(said.encode() + b"\n")
        line.flush()
    for slot in slots.values():
        slot.drop()


def main() -> None:
    """Find the environment, say how that went, serve."""
    number, packages, name, options_text = sys.argv[1:]
    # What an environment prints is nobody's business.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # In place of this folder, which has modules of the names of packages.
    sys.path[0] = os.getcwd()  # noqa: PTH109 - as python -m does
    sys.meta_path.insert(0, OwnPackage(packages))
    options: dict[str, Any] = json.loads(options_text)
    with socket.socket(fileno=int(number)) as channel, channel.makefile("rwb") as line:
        try:
            make = find(name)
            signature(make).bind(**options)
            serve(line, make, options)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - so does an import
            line.write(json.dumps(refusal(error)).encode() + b"\n")


def refusal(error: BaseException) -> dict[str, str]:
    """Return why there is no environment, and whose fault that is: a reason of astraflow."""
    match error:
        case ImportError() | AttributeError() | LookupError():
            reason = "CODE_UNKNOWN"
        case TypeError() | ValueError() | FileNotFoundError():
            reason = "INVALID_FIELD"
        case _:
            reason = "ENVIRONMENT_FAILED"
    return {**describe(error), "reason": reason}


if __name__ == "__main__":
    main()
