"""Code as the answer: a program runs on its tests in a sandbox."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from astraflow.config.strict import Options as AnyOptions
from astraflow.config.strict import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.building import build_sandboxes
from astraflow.workflows.protocol import Score
from astraflow.workflows.rewards.code_tests import (
    CallCase,
    Case,
    CheckCase,
    CodeTests,
    OutputCase,
    parse_tests,
    same_output,
    same_value,
)
from astraflow.workflows.rewards.exact import answer_of
from astraflow.workflows.sandbox.channel import run_inside
from astraflow.workflows.sandbox.guest import decoded
from astraflow.workflows.sandbox.pool import SandboxPool
from astraflow.workflows.sandbox.protocol import Finished, Sandbox

_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_SHOWN_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one case.

    Attributes:
        is_passed: Whether the output is right.
        why: `passed`, `wrong`, `crash`, `timeout`, `output` (there was too much of it), `memory`,
            or `lost`: the program has ended its sandbox.
        got: What the program wrote or returned, as text; cut.
        error: The end of what it wrote to standard error, or why a test failed.
    """

    is_passed: bool
    why: str
    got: str = ""
    error: str = ""


class Code:
    """1 when the last block of code passes all its tests, else 0 or the share that it passes."""

    class Options(Strict):
        """Where tests are, how they are judged, and where programs run."""

        field: str = "tests"
        """Field of the prompt with the tests."""
        partial: bool = False
        """The reward is the share of cases that pass; else all have to."""
        time_s: float = Field(default=6.0, gt=0)
        """Seconds for one case."""
        tolerance: float = Field(default=1e-6, ge=0)
        """Of numbers with a point or an exponent, relative or absolute."""
        wrapped: bool = False
        """Each output of a function is a list with the one value, as some data sets have it."""
        whole_text: bool = False
        """A text without a block of code is a program itself."""
        workers: int = Field(default=2, ge=1)
        """Programs that run at once."""
        ready: int = Field(default=2, ge=0)
        """Sandboxes that are started ahead."""
        sandbox: str = "bubblewrap"
        """Where programs run: bubblewrap, podman, docker, e2b, unsafe_process, or module:Class."""
        sandbox_options: AnyOptions = Field(default={})
        """Its own: memory_mb, processes and what else it takes."""

    def __init__(self, options: Options) -> None:
        self._options = options
        provider = build_sandboxes(
            options.sandbox, options.sandbox_options, where="scorer_options.sandbox_options"
        )
        self._pool = SandboxPool(provider, workers=options.workers, ready=options.ready)

    async def __call__(self, prompt: Prompt, text: str) -> Score:
        """Run the program.

        What the program does, whatever it is, is a verdict. What the sandbox does is an error.

        Raises:
            AstraflowError: SCORER_FAILED when the row's tests cannot be read or run themselves,
                ENVIRONMENT_FAILED when no sandbox starts here.
        """
        options = self._options
        tests = self._tests(prompt)
        source = program_of(text, whole_text=options.whole_text)
        if source is None:
            return Score(reward=0.0, parts={"passed": 0.0, "no_code": 1.0})
        async with self._pool.take() as sandbox:
            try:
                verdicts = await judge(
                    sandbox,
                    source,
                    tests,
                    time_s=options.time_s,
                    tolerance=options.tolerance,
                    stops_early=not options.partial,
                )
            except BrokenTestsError as error:
                raise self._unsound(prompt, str(error)) from error
        share = sum(verdict.is_passed for verdict in verdicts) / len(tests.cases)
        faults = {verdict.why: 1.0 for verdict in verdicts if not verdict.is_passed}
        return Score(
            reward=share if options.partial else float(share == 1),
            parts={"passed": share, **faults},
        )

    async def close(self) -> None:
        """End all its sandboxes."""
        await self._pool.close()

    def _tests(self, prompt: Prompt) -> CodeTests:
        said = answer_of(prompt, self._options.field)
        try:
            return parse_tests(said, is_wrapped=self._options.wrapped)
        except ValueError as error:
            raise self._unsound(prompt, str(error)) from error

    def _unsound(self, prompt: Prompt, why: str) -> AstraflowError:
        return AstraflowError(
            Reason.SCORER_FAILED,
            f"field '{self._options.field}' of prompt {prompt.prompt_id}: {why}; see sandbox.md",
        )


class BrokenTestsError(Exception):
    """CodeTests that cannot run themselves: it says why."""


def program_of(text: str, *, whole_text: bool = False) -> str | None:
    """Return the last fenced block of a text; None when there is none."""
    blocks = _BLOCK.findall(text)
    if blocks:
        return blocks[-1]
    return text if whole_text else None


async def judge(
    sandbox: Sandbox,
    source: str,
    tests: CodeTests,
    *,
    time_s: float,
    tolerance: float = 1e-6,
    stops_early: bool = False,
) -> list[Verdict]:
    """Run a program on its tests, each case in a fresh process.

    The right answers never enter the program's process; outputs are compared here, and what a
    function returned comes as plain data. A program that ends its sandbox fails what is left.

    Args:
        sandbox: A fresh one.
        source: The program.
        tests: What it has to pass.
        time_s: Seconds for one case.
        tolerance: Of numbers (`same_output`, `same_value`).
        stops_early: Run no more cases after the first that fails.

    Returns:
        A verdict for each case that ran, in their order.

    Raises:
        BrokenTestsError: A test that is code cannot run itself.
        AstraflowError: ENVIRONMENT_FAILED when the sandbox failed.
    """
    verdicts: list[Verdict] = []
    program = f"{tests.prefix}\n{source}" if tests.prefix else source
    for case in tests.cases:
        request, more = _request(case, program)
        finished, result = await run_inside(sandbox, request, *more, time_s=time_s)
        verdict = _verdict(case, finished, result, tolerance)
        verdicts.append(verdict)
        if finished.is_lost or (stops_early and not verdict.is_passed):
            break
    return verdicts


def _request(case: Case, source: str) -> tuple[dict[str, Any], tuple[Mapping[str, Any], ...]]:
    """Return what a guest is asked, and what its tests' process alone reads."""
    match case:
        case OutputCase():
            stdin = case.stdin.encode("utf-8", "replace")
            return {"do": "program", "source": source, "stdin": stdin}, ()
        case CallCase():
            call = {"name": case.name, "arguments": list(case.arguments)}
            return {"do": "call", "source": source, **call}, ()
        case CheckCase():
            tests = {"code": case.code, "entry_point": case.entry_point, "setup": case.setup}
            return {"do": "check", "source": source}, (tests,)


def _verdict(case: Case, finished: Finished, result: bytes, tolerance: float) -> Verdict:
    error = finished.stderr.decode("utf-8", "replace")[-_SHOWN_CHARS:]
    got = finished.stdout.decode("utf-8", "replace")
    why = _fault(finished)
    if not why and isinstance(case, OutputCase):
        why = "" if same_output(got, case.stdout, tolerance=tolerance) else "wrong"
    elif not why and isinstance(case, CallCase):
        got = result.decode("utf-8", "replace")
        why = "" if _returned(result, case, tolerance) else "wrong" if result else "crash"
    elif not why:
        said = result.decode("utf-8", "replace")
        if said.startswith("broken: "):
            raise BrokenTestsError(f"the tests themselves raise {said.removeprefix('broken: ')}")
        error = "" if said == "passed" else said or error
        why = "" if said == "passed" else "wrong"
    return Verdict(is_passed=not why, why=why or "passed", got=got[:_SHOWN_CHARS], error=error)


def _fault(finished: Finished) -> str:
    """Return what a program broke; empty when it came to its end."""
    if finished.is_timeout:
        return "timeout"
    if finished.is_out_of_memory:
        return "memory"
    if finished.is_lost:
        return "lost"
    if finished.is_truncated:
        return "output"
    return "" if finished.is_well else "crash"


def _returned(result: bytes, case: CallCase, tolerance: float) -> bool:
    try:
        return same_value(decoded(result), case.expected, tolerance=tolerance)
    except (ValueError, RecursionError):
        return False
