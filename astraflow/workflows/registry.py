"""Finds workflows, scorers and tutors by name, and digests their source.

A name is, in this order: built in, registered with a decorator, an entry point of an installed
package, or `module:attribute` of anything that can be imported.
"""

import importlib.util
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from astraflow.core.code import find_target, installed, load, see_working_directory
from astraflow.core.errors import AstraflowError, Reason

T = TypeVar("T")


class Kind(StrEnum):
    """What a name is of; entry points are in the group `astraflow.<kind>`."""

    WORKFLOW = "workflows"
    SCORER = "scorers"
    TUTOR = "tutors"
    ENVIRONMENT = "environments"
    SANDBOX = "sandboxes"


_BUILT_IN: Mapping[Kind, Mapping[str, str]] = {
    Kind.WORKFLOW: {
        "single_turn": "astraflow.workflows.single_turn:SingleTurn",
        "multi_turn_retry": "astraflow.workflows.multi_turn_retry:MultiTurnRetry",
        "solver_verifier": "astraflow.workflows.solver_verifier:SolverVerifier",
        "command": "astraflow.workflows.agents.workflows:Command",
        "agent": "astraflow.workflows.agents.workflows:Served",
        "verifiers": "astraflow.workflows.agents.verifiers:Verifiers",
        "vote": "astraflow.workflows.solver_verifier:Vote",
        "stored": "astraflow.workflows.stored:Stored",
        "environment": "astraflow.workflows.environments.workflow:EnvironmentWorkflow",
    },
    Kind.SCORER: {
        "exact": "astraflow.workflows.rewards.compare:Exact",
        "numeric": "astraflow.workflows.rewards.compare:Numeric",
        "f1": "astraflow.workflows.rewards.compare:F1",
        "regex": "astraflow.workflows.rewards.compare:Regex",
        "math": "astraflow.workflows.rewards.compare:Math",
        "judge": "astraflow.workflows.rewards.judge:Judge",
        "process": "astraflow.workflows.kept.scorer:ProcessScorer",
        "code": "astraflow.workflows.rewards.code:Code",
    },
    Kind.TUTOR: {},
    # Found, but made in another process; see `environments`.
    Kind.ENVIRONMENT: {
        name: f"astraflow.workflows.environments.adapters:{adapter}"
        for name, adapter in {
            "reasoning_gym": "ReasoningGym",
            "textarena": "TextArena",
            "gymnasium": "Gymnasium",
            "gem": "Gem",
            "textcraft": "TextCraft",
            "textworld": "TextWorld",
            "textworld_express": "TextWorldExpress",
            "alfworld": "AlfWorld",
            "openenv": "OpenEnv",
        }.items()
    },
    Kind.SANDBOX: {
        "bubblewrap": "astraflow.workflows.sandbox.bubblewrap:Bubblewrap",
        "podman": "astraflow.workflows.sandbox.containers:Podman",
        "docker": "astraflow.workflows.sandbox.containers:Docker",
        "e2b": "astraflow.workflows.sandbox.e2b:E2B",
        "unsafe_process": "astraflow.workflows.sandbox.process:UnsafeProcess",
    },
}


# What decorators registered in this process.
_REGISTERED: dict[tuple[Kind, str], Any] = {}


def _register(kind: Kind, name: str) -> Callable[[T], T]:
    def add(thing: T) -> T:
        known = _REGISTERED.get((kind, name))
        if name in _BUILT_IN[kind] or (known is not None and _place(known) != _place(thing)):
            raise AstraflowError(
                Reason.NAME_TAKEN, f"{kind}: the name {name} is taken; choose another"
            )
        _REGISTERED[kind, name] = thing
        return thing

    return add


def workflow(name: str) -> Callable[[T], T]:
    """Register a workflow class under a name."""
    return _register(Kind.WORKFLOW, name)


def scorer(name: str) -> Callable[[T], T]:
    """Register a scorer, a function or a class, under a name."""
    return _register(Kind.SCORER, name)


def tutor(name: str) -> Callable[[T], T]:
    """Register a tutor class under a name."""
    return _register(Kind.TUTOR, name)


def find(kind: Kind, name: str) -> Any:
    """Return what a name stands for; imports its module.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is nothing of that name here.
    """
    registered = _REGISTERED.get((kind, name))
    if registered is not None:
        return registered
    return load(target_of(kind, name), what=f"{kind}: {name}")


def code_digest(kind: Kind, name: str) -> bytes:
    """Return BLAKE3 of the source file that has the code, 32 bytes; nothing of it is run.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is nothing of that name here.
    """
    registered = _REGISTERED.get((kind, name))
    if registered is not None:
        return _file_digest(str(registered.__module__))
    return _file_digest(target_of(kind, name).partition(":")[0])


def target_of(kind: Kind, name: str, *, or_as_it_is: bool = False) -> str:
    """Return `module:attribute` of a name.

    Args:
        kind: What it is of.
        name: Built in, an entry point, or `module:attribute` itself.
        or_as_it_is: Return a name that is not known here, for it may be where the code runs.

    Raises:
        AstraflowError: CODE_UNKNOWN when there is nothing of that name here.
    """
    see_working_directory()
    if or_as_it_is and name not in {*_BUILT_IN[kind], *installed(f"astraflow.{kind}")}:
        return name
    return find_target(kind, name, _BUILT_IN[kind], names=names(kind))


def names(kind: Kind) -> tuple[str, ...]:
    """Return what is built in, what installed packages add, and what was registered here."""
    registered = {name for known, name in _REGISTERED if known is kind}
    return tuple(sorted({*_BUILT_IN[kind], *installed(f"astraflow.{kind}"), *registered}))


@cache
def _file_digest(module_name: str) -> bytes:
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError) as error:
        raise _no_source(module_name) from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise _no_source(module_name)
    return blake3(Path(spec.origin).read_bytes()).digest()


def _no_source(module_name: str) -> AstraflowError:
    return AstraflowError(
        Reason.CODE_UNKNOWN,
        f"module {module_name} is not here; is it installed, or on PYTHONPATH?",
    )


def _place(thing: Any) -> tuple[str, str]:
    return str(thing.__module__), str(thing.__qualname__)
