"""Forms of tests, and what counts as the same output."""

import json

import pytest

from astraflow.workflows.rewards.code import (
    CallCase,
    CheckCase,
    OutputCase,
    parse_tests,
    same_output,
    same_value,
)


def test_standard_input_and_output():
    wanted = (OutputCase(stdin="1 2", stdout="3"), OutputCase(stdin="4 5", stdout="9"))
    said = {"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]}
    assert parse_tests(said).cases == wanted
    assert parse_tests(json.dumps(said)).cases == wanted
    listed = [
        {"type": "stdin_stdout", "input": a, "output": b}
        for a, b in zip(*said.values(), strict=True)
    ]
    assert parse_tests(listed).cases == wanted
    assert parse_tests({"inputs": [["1", "2"]], "outputs": [3]}).cases[0] == OutputCase(
        stdin="1\n2", stdout="3"
    )


def test_functions():
    wanted = CallCase(name="add", arguments=(1, [2]), expected=[3])
    said = {"fn_name": "add", "inputs": [[1, [2]]], "outputs": [[3]]}
    assert parse_tests(said).cases == (wanted,)
    lines = {"fn_name": "add", "inputs": ["1\n[2]"], "outputs": ["[3]"]}
    assert parse_tests(lines).cases == (wanted,)
    text = {"fn_name": "f", "inputs": ['"a\u2028b"\n2'], "outputs": [3]}
    assert parse_tests(text).cases[0].arguments == ("a\u2028b", 2)
    listed = [{"type": "function_call", "fn_name": "add", "input": [1, [2]], "output": [3]}]
    assert parse_tests(listed).cases == (wanted,)
    (unwrapped,) = parse_tests(said, is_wrapped=True).cases
    assert unwrapped.expected == 3
    assert parse_tests(said | {"outputs": ["three"]}).cases[0].expected == "three"


def test_assertions():
    check = "def check(candidate): assert candidate(1) == 2"
    said = {"assert": check, "entry_point": "f", "setup": "import math", "prefix": "x = 1"}
    tests = parse_tests(said)
    assert tests.prefix == "x = 1"
    assert tests.cases == (CheckCase(code=check, entry_point="f", setup="import math"),)
    assert parse_tests(["assert f(1) == 2", "assert f(2) == 3"]).cases == (
        CheckCase(code="assert f(1) == 2"),
        CheckCase(code="assert f(2) == 3"),
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("{", "no JSON"),
        ("3", "neither an object nor a list"),
        ({}, "neither `inputs` and `outputs` nor `assert`"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ([], "0 inputs and 0 outputs"),
        ([{"output": "1"}], "something else than cases"),
        ([{"input": "1", "output": "1"}, {"input": "2"}], "case 1 has no `output`"),
        ([{"input": 1, "fn_name": "a"}, {"input": 1, "fn_name": "b"}], "several functions"),
        ({"assert": []}, "neither code"),
        ({"fn_name": "f", "inputs": ["{"], "outputs": ["1"]}, "one JSON value a line"),
    ],
)
def test_what_is_no_test_says_why(said, why):
    with pytest.raises(ValueError, match=why):
        parse_tests(said)
    with pytest.raises(ValueError, match="wrapped"):
        parse_tests({"fn_name": "f", "inputs": [[1]], "outputs": [1]}, is_wrapped=True)


@pytest.mark.parametrize(
    ("got", "expected", "is_same"),
    [
        ("3\n", "3", True),
        ("  1   2 \n3\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("2\n1", "1\n2", False),
        ("b a", "a b", False),
        ("0.30000000004", "0.3", True),
        ("0.31", "0.3", False),
        ("1e3", "1000.0", True),
        ("3.0", "3", True),
        ("1000000008", "1000000007", False),
        ("100000000000000001", "100000000000000002", False),
        ("1000000007", "1000000008.0", True),
        ("11", "0011", False),
        ("0.0", "0", True),
        ("-0", "0", True),
        ("nan", "0.5", False),
        ("nan", "nan", True),
        ("13e4567", "12e4567", False),
        ("12e4567", "12e4567", True),
        ("1_000", "1000", False),
        ("1_000.0", "1000.0", False),
        ("\u0661\u0662", "12", False),
        (".5", "5.e-1", True),
        ("yes", "YES", False),
        ("", "", True),
        ("0", "", False),
    ],
)
def test_outputs(got, expected, is_same):
    assert same_output(got, expected, tolerance=1e-6) is is_same


@pytest.mark.parametrize(
    ("got", "expected", "is_same"),
    [
        ((1, [2]), [1, [2]], True),
        ([1], [1, 2], False),
        ([2, 1], [1, 2], False),
        ({1, 2}, [1, 2], False),
        ({1: "a"}, {"1": "a"}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (3.0000000001, 3, False),
        (True, 1.0, False),
        ("1", 1, False),
        (None, None, True),
        (float("nan"), 0.5, False),
        ([3], 3, False),
    ],
)
def test_values(got, expected, is_same):
    assert same_value(got, expected, tolerance=1e-6) is is_same
