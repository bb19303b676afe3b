"""Verifiers: an environment of the package `verifiers` is the workflow.

It runs in an interpreter of its own, which has verifiers and the environment; this one need not
have them. `verifiers_agent` is what runs there.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field

from astraflow.config.strict import Options
from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.agents.workflows import (
    Command,
    CommandOptions,
    ProgramOptions,
    environment,
)
from astraflow.workflows.scoring import GuardedScorer, refuse_scorer

_AGENT = Path(__file__).with_name("verifiers_agent.py")
_SHOWN_CHARS = 600


class VerifiersOptions(ProgramOptions):
    """Which environment, and where it is installed."""

    environment: str = Field(min_length=1)
    """As verifiers.load_environment takes it."""
    arguments: Options = Field(default={})
    """Of load_environment."""
    python: str = ""
    """Interpreter of the environment's own venv; empty: this one."""
    persistent: int = Field(default=4, ge=0)
    """Processes that stay, each for one episode after the other; 0: a process per episode, each
    of which loads the environment anew."""
    time_s: float = Field(default=600.0, gt=0)
    """Seconds for one episode."""


class Verifiers(Command):
    """Lets an environment run the episode, and takes the reward of its rubric."""

    Options = VerifiersOptions  # pyright: ignore[reportAssignmentType] - a class of its own

    def __init__(self, options: VerifiersOptions, scorer: GuardedScorer | None) -> None:
        refuse_scorer(scorer, "a verifiers environment has a rubric of its own")
        self._python = options.python
        command = agent_command(options.environment, options.arguments, python=options.python)
        shared = options.model_dump(include=set(ProgramOptions.model_fields))
        super().__init__(CommandOptions(command=tuple(command), **shared), None)

    def lacks(self) -> Iterator[str]:
        """Yield that the interpreter is not here, or that it is this one and lacks verifiers."""
        if self._python:
            if shutil.which(self._python) is None:
                yield f"{self._python} cannot be executed; options.python is an interpreter"
        elif find_spec("verifiers") is None:
            yield "verifiers is not installed; give options.python of an environment that has it"


def agent_command(
    environment_name: str, arguments: Mapping[str, Any], *more: str, python: str = ""
) -> Sequence[str]:
    """Return how the agent of an environment is started."""
    return (python or sys.executable, str(_AGENT), environment_name, json.dumps(arguments), *more)


def export_rows(
    path: Path, environment_name: str, arguments: Mapping[str, Any], *, split: str, python: str
) -> int:
    """Write the rows of an environment's data set as lines of JSON; return how many they are.

    Raises:
        AstraflowError: ENVIRONMENT_FAILED with what the environment's interpreter said.
    """
    command = agent_command(environment_name, arguments, "--rows", split, python=python)
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=environment({}))  # noqa: S603 - as the user names it
    except OSError as error:
        raise _failed(f"{command[0]} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise _failed(done.stderr.decode("utf-8", "replace").strip()[-_SHOWN_CHARS:])
    path.write_bytes(done.stdout)
    return done.stdout.count(b"\n")


def _failed(why: str) -> AstraflowError:
    return AstraflowError(Reason.ENVIRONMENT_FAILED, f"the environment gave no rows: {why}")
