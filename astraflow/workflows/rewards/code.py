"""Code as the answer: a program runs on its tests in a sandbox, in the forms of data sets."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, cast

from pydantic import Field

from astraflow.config.strict import Options as AnyOptions
from astraflow.config.strict import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.building import build_sandboxes
from astraflow.workflows.protocol import Score
from astraflow.workflows.rewards.compare import answer_of
from astraflow.workflows.sandbox.channel import run_inside
from astraflow.workflows.sandbox.guest import decoded
from astraflow.workflows.sandbox.pool import SandboxPool
from astraflow.workflows.sandbox.protocol import Finished, Sandbox

_EXACT_BELOW = 2**53

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCase:
    """A program reads something and writes something.

    Attributes:
        stdin: What it reads.
        stdout: What it should write.
    """

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """A function is called and returns something.

    Attributes:
        name: Of the function, or of a method of a class `Solution`.
        arguments: Plain data.
        expected: Plain data.
    """

    name: str
    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCase:
    """Code calls functions of the program, and raises when something is wrong.

    Attributes:
        code: The tests.
        entry_point: Function that `check(candidate)` of the code is called with; empty: the code
            calls functions of the program by their names.
        setup: Code that runs before: imports and helpers of the tests.
    """

    code: str
    entry_point: str = ""
    setup: str = ""


Case = OutputCase | CallCase | CheckCase


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """What a program has to pass.

    Attributes:
        cases: One after the other; at least one.
        prefix: Code before the program's own, such as the imports that its prompt shows.
    """

    cases: tuple[Case, ...]
    prefix: str = ""


def parse_tests(said: Any, *, is_wrapped: bool = False) -> CodeTests:
    """Read tests in any of these forms; text is read as JSON first.

    - `{"inputs": ["1 2"], "outputs": ["3"]}`: standard input and output.
    - `{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}`: a function; an input that is text
      has one argument in JSON on each line, an output that is text is JSON where it reads as such.
    - `[{"input": …, "output": …, "fn_name": …}, …]`: the same, case by case.
    - `{"assert": "def check(candidate): …", "entry_point": "add", "setup": "", "prefix": ""}`, or a
      list of `assert` statements.

    Args:
        said: The tests.
        is_wrapped: Each output of a function is a list with the one value.

    Raises:
        ValueError: It is none of these; says why.
    """
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except ValueError as error:
            raise ValueError(f"tests are no JSON: {error}") from error
    if isinstance(said, list):
        said = _gathered(cast("list[Any]", said))
    if not isinstance(said, dict):
        raise ValueError("tests are neither an object nor a list")  # noqa: TRY004 - of a data set
    found = cast("dict[str, Any]", said)
    prefix = str(found.get("prefix") or "")
    if "assert" in found:
        return CodeTests(cases=_checks(found), prefix=prefix)
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("tests have neither `inputs` and `outputs` nor `assert`")  # noqa: TRY004
    inputs, outputs = cast("list[Any]", inputs), cast("list[Any]", outputs)
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    name = found.get("fn_name")
    if not name:
        cases = tuple(OutputCase(stdin=_text(a), stdout=_text(b)) for a, b in pairs)
        return CodeTests(cases=cases, prefix=prefix)
    calls = tuple(
        CallCase(
            name=str(name),
            arguments=_arguments(given),
            expected=_expected(wanted, is_wrapped=is_wrapped),
        )
        for given, wanted in pairs
    )
    return CodeTests(cases=calls, prefix=prefix)


def _gathered(cases: list[Any]) -> dict[str, Any]:
    """Return a list of cases in the form with one list of inputs, or of `assert` statements."""
    if cases and all(isinstance(case, str) for case in cases):
        return {"assert": cases}
    found = [cast("Mapping[str, Any]", case) for case in cases if isinstance(case, dict)]
    if len(found) != len(cases) or any("input" not in case for case in found):
        raise ValueError("tests are a list of something else than cases with `input` and `output`")
    names = {case.get("fn_name") or "" for case in found}
    if len(names) > 1:
        raise ValueError(f"tests call several functions: {', '.join(sorted(map(repr, names)))}")
    unsaid = [number for number, case in enumerate(found) if "output" not in case]
    if unsaid:
        raise ValueError(f"case {unsaid[0]} has no `output`")
    return {
        "inputs": [case["input"] for case in found],
        "outputs": [case["output"] for case in found],
        "fn_name": next(iter(names), ""),
    }


def _checks(found: Mapping[str, Any]) -> tuple[Case, ...]:
    said = found["assert"]
    codes: Sequence[Any] = [said] if isinstance(said, str) else said
    entry, setup = str(found.get("entry_point") or ""), str(found.get("setup") or "")
    if not codes or not all(isinstance(code, str) for code in codes):
        raise ValueError("`assert` is neither code nor a list of code")
    return tuple(CheckCase(code=code, entry_point=entry, setup=setup) for code in codes)


def _text(said: Any) -> str:
    if isinstance(said, list):
        return "\n".join(map(str, cast("list[Any]", said)))
    return said if isinstance(said, str) else json.dumps(said)


def _arguments(said: Any) -> tuple[Any, ...]:
    if isinstance(said, str):
        try:
            # Only these end a line: a text in JSON may have line ends of Unicode.
            return tuple(json.loads(line) for line in said.split("\n") if line.strip())
        except ValueError as error:
            raise ValueError(f"an input is not one JSON value a line: {error}") from error
    return tuple(cast("list[Any]", said)) if isinstance(said, list) else (said,)


def _expected(said: Any, *, is_wrapped: bool) -> Any:
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except ValueError:
            return said
    if not is_wrapped:
        return said
    if not isinstance(said, list) or len(cast("list[Any]", said)) != 1:
        raise ValueError("an output is no list with one value, as scorer_options.wrapped says")
    return cast("list[Any]", said)[0]


def same_output(got: str, expected: str, *, tolerance: float) -> bool:
    """Whether two texts are equal but for white space and the last digits of numbers.

    White space around the whole text does not count. Then there are as many lines, in the same
    order, and their words are equal; a word that should be a number with a point or an exponent may
    differ by `tolerance`, relative or absolute. Whole numbers are equal or not, and digits that
    begin with a zero are no number: 11 is not the bits 0011. What is none, as `inf` or `1_000`, or
    is beyond all floats, is a word as others.
    """
    mine, theirs = ([line.split() for line in s.strip().splitlines()] for s in (got, expected))
    return [*map(len, mine)] == [*map(len, theirs)] and all(
        a == b or _same_number(a, b, tolerance)
        for a, b in zip(chain(*mine), chain(*theirs), strict=True)
    )


def _same_number(got: str, expected: str, tolerance: float) -> bool:
    if not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(expected)):
        return False
    mine, theirs = float(got), float(expected)
    digits = expected.lstrip("+-")
    if digits.isdecimal():
        is_number = digits == "0" or not digits.startswith("0")
        return is_number and mine == theirs and abs(theirs) < _EXACT_BELOW
    is_close = math.isclose(mine, theirs, rel_tol=tolerance, abs_tol=tolerance)
    return is_close and math.isfinite(theirs)


def same_value(got: Any, expected: Any, *, tolerance: float) -> bool:
    """Whether two values are equal as JSON.

    Tuples are lists, keys of objects are text, and where a number with a point is expected it may
    differ by `tolerance`, relative or absolute. A set is never a list.
    """
    match expected:
        case list() | tuple():
            theirs = list(cast("Sequence[Any]", expected))
            ours = list(cast("Sequence[Any]", got)) if isinstance(got, list | tuple) else None
        case dict():
            theirs = _by_text(cast("dict[Any, Any]", expected))
            ours = _by_text(cast("dict[Any, Any]", got)) if isinstance(got, dict) else None
        case float():
            is_number = isinstance(got, int | float) and not isinstance(got, bool)
            return is_number and math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
        case _:
            return bool(got == expected)
    return (
        ours is not None
        and len(ours) == len(theirs)
        and all(same_value(a, b, tolerance=tolerance) for a, b in zip(ours, theirs, strict=True))
    )


def _by_text(values: dict[Any, Any]) -> list[Any]:
    """Return keys as text and their values, in the order of the keys."""
    pairs = [(str(key), value) for key, value in values.items()]
    return [list(pair) for pair in sorted(pairs, key=itemgetter(0))]


_BLOCK = re.compile(r"^([ \t]*)```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)

_SHOWN_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseVerdict:
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
        said = answer_of(prompt, options.field)
        try:
            tests = parse_tests(said, is_wrapped=options.wrapped)
        except ValueError as error:
            raise self._unsound(prompt, str(error)) from error
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

    def _unsound(self, prompt: Prompt, why: str) -> AstraflowError:
        return AstraflowError(
            Reason.SCORER_FAILED,
            f"field '{self._options.field}' of prompt {prompt.prompt_id}: {why}; see sandbox.md",
        )


class BrokenTestsError(Exception):
    """CodeTests that cannot run themselves: it says why."""


def program_of(text: str, *, whole_text: bool = False) -> str | None:
    """Return the last fenced block of a text; None when there is none.

    In a list fences are indented, and the program by as much: that much is taken off its lines, as
    CommonMark has it.
    """
    blocks = _BLOCK.findall(text)
    if not blocks:
        return text if whole_text else None
    indent, block = blocks[-1]
    return re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", block, flags=re.MULTILINE) if indent else block


async def judge(
    sandbox: Sandbox,
    source: str,
    tests: CodeTests,
    *,
    time_s: float,
    tolerance: float = 1e-6,
    stops_early: bool = False,
) -> list[CaseVerdict]:
    """Run a program on its tests, each case in a fresh process.

    The right answers never enter the program's process; outputs are compared here, and what a
    function returned comes as plain data. A program that ends its sandbox fails what is left.
    With `stops_early` no case runs after the first that fails.

    Returns:
        A verdict for each case that ran, in their order.

    Raises:
        BrokenTestsError: A test that is code cannot run itself.
        AstraflowError: ENVIRONMENT_FAILED when the sandbox failed.
    """
    verdicts: list[CaseVerdict] = []
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


def _verdict(case: Case, finished: Finished, result: bytes, tolerance: float) -> CaseVerdict:
    error = finished.stderr.decode("utf-8", "replace")[-_SHOWN_CHARS:]
    got = finished.stdout.decode("utf-8", "replace")
    why = _fault(finished)
    if not why and isinstance(case, OutputCase):
        why = "" if same_output(got, case.stdout, tolerance=tolerance) else "wrong"
    elif not why and isinstance(case, CallCase):
        got = result.decode("utf-8", "replace")
        try:
            is_same = same_value(decoded(result), case.expected, tolerance=tolerance)
        except (ValueError, OverflowError, RecursionError):
            is_same = False
        why = "" if is_same else "wrong" if result else "crash"
    elif not why:
        said = result.decode("utf-8", "replace")
        if said.startswith("broken: "):
            raise BrokenTestsError(f"the tests themselves raise {said.removeprefix('broken: ')}")
        error = "" if said == "passed" else said or error
        why = "" if said == "passed" else "wrong"
    return CaseVerdict(is_passed=not why, why=why or "passed", got=got[:_SHOWN_CHARS], error=error)


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
