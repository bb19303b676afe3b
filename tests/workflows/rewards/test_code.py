# ruff: noqa: E501 - programs are easier to read on their own lines
"""Programs as answers: what they are worth, and what they cannot pretend."""

import asyncio
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.building import build_scorer
from astraflow.workflows.data_sets import JsonLines, human_eval_rows, write_human_eval
from astraflow.workflows.rewards.code import program_of
from astraflow.workflows.sandbox.guest import decoded, encoded

SUMS = {"inputs": ["1 2", "30 40", "-1 1"], "outputs": ["3", "70", "0"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [30, 40]], "outputs": [3, 70]}
CHECK = {
    "assert": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(30, 40) == 70",
    "entry_point": "add",
}
RIGHT = {
    "sums": "a, b = map(int, input().split())\nprint(a + b)",
    "add": "def add(a, b):\n    return a + b",
}


@pytest.fixture
async def make():
    made = []

    def scorer(**options):
        made.append(build_scorer("code", {"ready": 1} | options, where="scorer_options"))
        return made[-1]

    yield scorer
    for each in made:
        await each.close()


def asked(tests, **fields):
    return Prompt(prompt_id="p", data_set="d", fields={"tests": tests} | fields)


def fenced(program):
    return f"Here it is:\n\n```python\n{program}\n```\nThat is all."


def test_the_last_block_is_the_program():
    text = f"```\nfirst\n```\nthen\n{fenced('second')}"
    assert program_of(text) == "second\n"
    assert program_of("~~~\nprint()\n") is None
    assert program_of("print()", whole_text=True) == "print()"
    assert program_of("```python\nnever closed") is None
    assert program_of("```py\n    indented\n```") == "    indented\n"
    in_a_list = "1. So:\n\n   ```py\n   if x:\n       y\n\n  z\n   ```\n"
    assert program_of(in_a_list) == "if x:\n    y\n\nz\n"


async def test_programs_that_are_right(make):
    score = await make()(asked(SUMS), fenced(RIGHT["sums"]))
    assert (score.reward, dict(score.parts)) == (1.0, {"passed": 1.0})
    assert (await make()(asked(ADD), fenced(RIGHT["add"]))).reward == 1.0
    assert (await make()(asked(CHECK), fenced(RIGHT["add"]))).reward == 1.0
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert (await make()(asked(ADD), fenced(method))).reward == 1.0
    listed = ["assert add(1, 2) == 3", "assert add(*[2, 2]) == 4"]
    assert (await make()(asked(listed), fenced(RIGHT["add"]))).reward == 1.0


async def test_tests_have_the_functions_of_python_in_every_sandbox(make):
    listed = ["assert len(f(2)) == 2", "assert sorted(f(3), key=lambda n: -n)[0] == max(0, 1, 2)"]
    program = fenced("def f(n):\n    return list(range(n))")
    for sandbox in ("bubblewrap", "unsafe_process"):
        assert (await make(sandbox=sandbox)(asked(listed), program)).reward == 1.0


async def test_partial_credit_and_all_or_nothing(make):
    program = fenced("a, b = map(int, input().split())\nprint(a + b if a < 10 else 0)")
    whole = await make()(asked(SUMS), program)
    assert (whole.reward, whole.parts["wrong"]) == (0.0, 1.0)
    part = await make(partial=True)(asked(SUMS), program)
    assert part.reward == pytest.approx(2 / 3)
    assert part.parts["passed"] == pytest.approx(2 / 3)


async def test_what_a_program_does_is_its_own_affair(make):
    ends = {
        "while True: pass": "timeout",
        "import time\ntime.sleep(1000)": "timeout",
        "raise ValueError('no')": "crash",
        "import os\nos._exit(0)": "wrong",
        "import sys\nsys.exit(0)": "wrong",
        "import os\nos.abort()": "crash",
        "x = bytearray(2**34)": "crash",
        "def f(:": "crash",
        "while True: print('x' * 2**16)": "output",
        "print('\\udc80')": "wrong",
    }
    scorer = make(time_s=0.5)
    for program, why in ends.items():
        score = await scorer(asked(SUMS), fenced(program))
        assert (score.reward, why in score.parts) == (0.0, True), (program, score)
    assert (await scorer(asked(SUMS), "no code")).parts["no_code"] == 1.0


FORGED = {
    "an object that equals everything": (
        "class All:\n    def __eq__(self, other): return True\n    def __add__(self, o): return self\n"
        "def add(a, b): return All()"
    ),
    "a number that equals everything": (
        "class All(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return All(7)"
    ),
    "leaves before the tests": "import sys\nsys.exit(0)\ndef add(a, b): return 0",
    "leaves at once": "import os\nos._exit(0)\ndef add(a, b): return 0",
    "leaves when called": "import os\ndef add(a, b): os._exit(0)",
    "writes a verdict": (
        "import os\ndef add(a, b):\n    for n in range(1, 64):\n        try: os.write(n, b'passed')\n"
        "        except OSError: pass\n    os._exit(0)"
    ),
    "patches what tests use": (
        "import builtins, sys, json\nbuiltins.AssertionError = SystemExit\nbuiltins.open = print\n"
        "json.dumps = json.loads = lambda *a, **k: 3\n"
        "for m in list(sys.modules.values()):\n    try: m.check = m._test = lambda *a: None\n"
        "    except Exception: pass\ndef add(a, b): return 0"
    ),
    "looks for the tests": (
        "import gc, sys\ndef add(a, b):\n    frame = sys._getframe()\n    text = ''\n"
        "    while frame:\n        text += repr(frame.f_globals) + repr(frame.f_locals)\n"
        "        frame = frame.f_back\n    text += ''.join(map(repr, gc.get_objects()))\n"
        "    text += open('/proc/self/cmdline').read()\n"
        "    return 3 if any(name + chr(40) + '1, 2)' in text for name in ('candidate', 'add')) else 0"
    ),
    "reads all its memory": (
        "import re\ndef add(a, b):\n    found = b''\n    try:\n"
        "        for line in open('/proc/self/maps'):\n"
        "            lo, hi = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "            if ' r' in line:\n                with open('/proc/self/mem', 'rb') as f:\n"
        "                    try: f.seek(lo); found += f.read(hi - lo)\n"
        "                    except (OSError, ValueError): pass\n    except OSError: pass\n"
        "    return a + b if b'(30,' + bytes([32]) + b'40) ==' in found else 0"
    ),
    "kills the tests": (
        "import os\ndef add(a, b):\n    for pid in range(1, 99):\n        if pid != os.getpid():\n"
        "            try: os.kill(pid, 9)\n            except OSError: pass\n    return 0"
    ),
    "raises what tests expect": "def add(a, b): raise SystemExit(0)",
    "a result that is no data": "def add(a, b): return lambda: 3",
    "a result without an end": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "a result that is too large": "def add(a, b): return 'x' * 2**22",
}


@pytest.mark.parametrize("name", FORGED)
async def test_a_verdict_cannot_be_forged(make, name):
    scorer = make(time_s=3.0)
    for tests in (ADD, CHECK, ["assert add(1, 2) == 3"]):
        assert (await scorer(asked(tests), fenced(FORGED[name]))).reward == 0.0
    assert (await scorer(asked(CHECK), fenced(RIGHT["add"]))).reward == 1.0


async def test_a_whole_number_beyond_all_floats_is_wrong_and_no_failure(make):
    half = {"fn_name": "half", "inputs": [[3]], "outputs": [1.5]}
    forged = "import os\ndef half(n):\n    os.write(3, b'{\"f\": 1' + b'0' * 400 + b'}')\n    os._exit(0)"
    for program in ("def half(n):\n    return 10**400", forged):
        assert (await make()(asked(half), fenced(program))).parts["wrong"] == 1.0


async def test_a_forged_output_is_only_an_output(make):
    program = "import sys\nsys.stdout.write('3')\nprint()\nprint('passed')"
    assert (await make()(asked(SUMS), fenced(program))).reward == 0.0


async def test_nothing_of_one_program_is_there_for_the_next(make):
    scorer = make(workers=1)
    leaves = "open('/tmp/x', 'w').write('1')\nopen('/dev/shm/x', 'w').write('1')\nprint(3)"
    finds = "import os\nprint(3 + os.path.exists('/tmp/x') + os.path.exists('/dev/shm/x'))"
    one = {"inputs": [""], "outputs": ["3"]}
    assert (await scorer(asked(one), fenced(leaves))).reward == 1.0
    assert (await scorer(asked(one), fenced(finds))).reward == 1.0


async def test_many_programs_at_once(make):
    scorer = make(workers=4, ready=2)
    programs = [fenced(f"{RIGHT['sums']}\nif {n % 2}: print(1)") for n in range(12)]
    scores = await asyncio.gather(*(scorer(asked(SUMS), program) for program in programs))
    assert [score.reward for score in scores] == [float(n % 2 == 0) for n in range(12)]


async def test_rows_that_cannot_be_judged_are_errors(make):
    scorer = make()
    for tests, why in (({"inputs": ["1"]}, "neither"), ("{", "no JSON")):
        with pytest.raises(AstraflowError, match=why) as caught:
            await scorer(asked(tests), fenced("print()"))
        assert caught.value.reason is Reason.SCORER_FAILED
    with pytest.raises(AstraflowError, match="ModuleNotFoundError"):
        await scorer(asked(CHECK | {"setup": "import no_such"}), fenced(RIGHT["add"]))
    with pytest.raises(AstraflowError, match="SyntaxError"):
        await scorer(asked({"assert": "def check("}), fenced(RIGHT["add"]))
    with pytest.raises(AstraflowError, match="no field 'tests'"):
        await scorer(Prompt(prompt_id="p", data_set="d", fields={}), fenced("print()"))


async def test_a_sandbox_that_cannot_start_is_an_error_and_no_reward(make):
    scorer = make(sandbox_options={"python": "/no/such/python"})
    with pytest.raises(AstraflowError, match=r"sandbox_options\.python") as caught:
        await scorer(asked(SUMS), fenced(RIGHT["sums"]))
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED


@pytest.mark.slow
async def test_human_eval_judges_its_own_solutions(make, tmp_path):
    scorer = make(workers=2, ready=2, time_s=30.0)
    count = write_human_eval(tmp_path / "human_eval.jsonl")
    rows = list(JsonLines(Path(tmp_path / "human_eval.jsonl")))
    assert count == len(rows) == 164
    assert rows == list(human_eval_rows())
    # Every eighth, and those whose tests need what the prompt defines.
    chosen = [row for number, row in enumerate(rows) if number % 8 == 0 or number in (32, 38, 50)]

    async def score(row, program):
        prompt = Prompt(prompt_id=row["id"], data_set="d", fields=row)
        return (await scorer(prompt, fenced(program))).reward

    whole = [score(row, row["prompt"] + row["solution"]) for row in chosen]
    bodies = [score(row, row["solution"].strip("\n")) for row in chosen]
    assert await asyncio.gather(*whole, *bodies) == [1.0] * 2 * len(chosen)
    wrong = [score(row, f"def {row['tests']['entry_point']}(*a): return 1") for row in chosen]
    assert await asyncio.gather(*wrong) == [0.0] * len(chosen)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -(10**30), 1.5, "a\"\\\n\u2028é", [1, [2]], (1, (2,)), {1, 2}, {1: {"a": ()}},
     b"\x00\xff", 1 + 2j, float("inf"), {(1, 2): [None]}, {"t": [1]}, [], {}],
)  # fmt: skip
def test_plain_data_comes_back_as_it_was(value):
    back = decoded(encoded(value).encode())
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"x": 1}',
        b'{"s": [[1]]}',
        b"[" * 100_000,
        b'{"d": 3}',
        b'{"c": [1%b, 0]}' % (b"0" * 400),
    ],
)
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        decoded(text)
