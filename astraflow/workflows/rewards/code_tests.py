"""Tests of programs, in the forms in which data sets write them, and how outputs are compared."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, cast

_EXACT_BELOW = 2**53


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
    pairs = list(zip(cast("list[Any]", inputs), cast("list[Any]", outputs), strict=False))
    if len(cast("list[Any]", inputs)) != len(cast("list[Any]", outputs)) or not pairs:
        raise ValueError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")  # pyright: ignore[reportUnknownArgumentType]
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
    return {
        "inputs": [case["input"] for case in found],
        "outputs": [case.get("output") for case in found],
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
            return tuple(json.loads(line) for line in said.splitlines() if line.strip())
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
    differ by `tolerance`, relative or absolute. Whole numbers are equal or not.
    """
    mine, theirs = got.strip().splitlines(), expected.strip().splitlines()
    return len(mine) == len(theirs) and all(
        _same_line(a.split(), b.split(), tolerance) for a, b in zip(mine, theirs, strict=True)
    )


def _same_line(got: list[str], expected: list[str], tolerance: float) -> bool:
    return len(got) == len(expected) and all(
        a == b or _same_number(a, b, tolerance) for a, b in zip(got, expected, strict=True)
    )


def _same_number(got: str, expected: str, tolerance: float) -> bool:
    try:
        mine, theirs = float(got), float(expected)
    except ValueError:
        return False
    if expected.lstrip("+-").isdecimal():
        return mine == theirs and abs(theirs) < _EXACT_BELOW
    return math.isclose(mine, theirs, rel_tol=tolerance, abs_tol=tolerance)


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
