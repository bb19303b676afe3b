"""Scorers in processes of their own."""

from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.building import build_scorer
from astraflow.workflows.protocol import PolicyFault
from astraflow.workflows.registry import Kind, find

PROMPT = Prompt(prompt_id="1", data_set="d", fields={"answer": "42"})
FILE = Path(__file__).with_name("scorers.py")


@pytest.fixture
async def make(monkeypatch):
    monkeypatch.syspath_prepend(FILE.parent)
    made = []

    def scorer(name, **options):
        made.append(build_scorer(name, options, where="scorer_options"))
        return made[-1]

    yield scorer
    for each in made:
        await each.close()


@pytest.mark.slow
async def test_an_answer_that_means_harm_is_the_policys_fault(make):
    scorer = make("process", scorer="scorers:hostile", time_s=3.0)
    expected = {"exit": "died", "memory": "MemoryError", "loop": "longer than 3 s"}
    for text, message in expected.items():
        with pytest.raises(PolicyFault, match=message):
            await scorer(PROMPT, text)
    assert (await scorer(PROMPT, "fine")).reward == 1.0


@pytest.mark.slow
async def test_what_the_code_of_a_scorer_raises_is_its_own_failure(make):
    scorer = make("process", scorer="scorers:hostile")
    for text, message in {"raise": "ValueError: no such unit", "sys.exit": "SystemExit"}.items():
        with pytest.raises(AstraflowError, match=message) as caught:
            await scorer(PROMPT, text)
        assert caught.value.reason is Reason.SCORER_FAILED


@pytest.mark.slow
@pytest.mark.parametrize("text", ["import os; os._exit(0)", "import sys; sys.exit(0)", "exit()"])
async def test_a_program_that_exits_is_the_policys_fault(make, text):
    with pytest.raises(PolicyFault, match="died"):
        await make("process", scorer="scorers:run")(PROMPT, text)


@pytest.mark.slow
async def test_a_scorer_has_one_thread_however_many_processors_there_are(make, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("ASTRAFLOW_JOIN_TOKEN", "secret")
    assert (await make("process", scorer="scorers:threads")(PROMPT, "")).reward == 1.0


@pytest.mark.slow
async def test_a_process_that_is_not_ready_in_time_is_no_fault_of_the_policy(make, monkeypatch):
    monkeypatch.setattr("astraflow.workflows.kept.scorer._STARTING_S", 0.001)
    with pytest.raises(AstraflowError, match="was not ready within") as caught:
        await make("process", scorer="scorers:length")(PROMPT, "")
    assert caught.value.reason is Reason.SCORER_FAILED


@pytest.mark.slow
async def test_a_scorer_that_is_closed_says_nothing_more(make, capfd):
    scorer = make("process", scorer="scorers:length")
    await scorer(PROMPT, "four")
    await scorer.close()
    assert not capfd.readouterr().err


@pytest.mark.slow
async def test_a_recipe_can_blame_the_scorer(make):
    options = {"on_timeout": "failure", "on_death": "failure", "time_s": 3.0}
    scorer = make("process", scorer="scorers:hostile", **options)
    expected = {"exit": Reason.SCORER_FAILED, "sleep": Reason.SCORER_TIMEOUT}
    for text, reason in expected.items():
        with pytest.raises(AstraflowError) as caught:
            await scorer(PROMPT, text)
        assert caught.value.reason is reason


@pytest.mark.slow
async def test_options_that_do_not_fit_are_told(make):
    scorer = make("process", scorer="exact", scorer_options={"fields": "x"})
    with pytest.raises(AstraflowError, match="fields") as caught:
        await scorer(PROMPT, "42")
    assert caught.value.__cause__ is None


@pytest.mark.slow
async def test_a_pattern_finds_the_answer_and_one_that_never_ends_is_killed(make):
    scorer = make("regex", pattern=r"answer: (\w+)")
    assert (await scorer(PROMPT, "answer: 41, no, answer: 42")).reward == 1.0
    assert (await scorer(PROMPT, "answer: 41")).reward == 0.0
    assert (await scorer(PROMPT, "42")).parts == {"found": 0.0}
    endless = make("regex", pattern=r"(a+)+$", time_s=0.3)
    with pytest.raises(PolicyFault, match="longer than"):
        await endless(PROMPT, "a" * 64 + "b")


@pytest.mark.slow
async def test_expressions_are_equal_however_they_are_written(make):
    pytest.importorskip("math_verify")
    scorer = make("math", time_s=30.0)
    half = Prompt(prompt_id="1", data_set="d", fields={"answer": r"\frac{1}{2}"})
    assert (await scorer(half, "So it is $0.5$")).reward == 1.0
    assert (await scorer(half, "So it is $0.6$")).reward == 0.0


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"10\sqrt{2}", r"\boxed{10\sqrt{2}}", r"\boxed{10}"),
        (r"2\pi", r"$2\pi$", "$2$"),
        (r"\frac 12", "$0.5$", "$12$"),
        ("6r^2-4r-24", "$6r^2-4r-24$", "$6$"),
        ("-2,1", r"\boxed{1,-2}", r"\boxed{-2.1}"),
        (r"3\sqrt{2} \text{ square units}", r"\boxed{3\sqrt{2}}", r"\boxed{3}"),
        (r"5 \cdot xy", "$5xy$", "$5$"),
        (r"\$18.90", r"\boxed{\$18.90}", r"\boxed{18}"),
        ("p - q", r"\boxed{p-q}", r"\boxed{q-p}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"$\begin{pmatrix}1\\2\end{pmatrix}$", "$1$"),
        ("10sqrt(2)", r"$10\sqrt{2}$", "$10$"),
        ("18 dollars", "$18$", "$8$"),
        ("Answer: 5", "$5$", "$8$"),
        (r"\boxed{7}", "7", "8"),
        (r"So it is $\frac{1}{2}$.", "$0.5$", "$2$"),
        ("They sold 48/2 = 24 clips, 72 in all.\n#### 72", "72", "24"),
        (1e-05, r"\boxed{0.00001}", r"\boxed{1}"),
        (1.5e22, r"$1.5 \cdot 10^{22}$", "$22$"),
    ],
)
def test_a_right_answer_is_read_whole(answer, right, wrong):
    pytest.importorskip("math_verify")
    scorer = build_scorer("math", {}, where="scorer_options").in_process()
    prompt = Prompt(prompt_id="1", data_set="d", fields={"answer": answer})
    assert scorer(prompt, f"So the answer is {right}").reward == 1.0
    assert scorer(prompt, f"So the answer is {wrong}").reward == 0.0
    assert scorer(prompt, scorer.gold(prompt)).reward == 1.0


def test_all_of_them_have_names():
    for name in ("regex", "math", "judge", "process"):
        assert find(Kind.SCORER, name).Options


@pytest.mark.parametrize(
    ("name", "options", "gold"),
    [
        ("process", {"scorer": "exact"}, "42"),
        ("math", {}, "42"),
        ("regex", {"pattern": r"answer: (\w+)"}, None),
    ],
)
async def test_the_same_scorer_can_be_had_in_this_process(make, name, options, gold):
    scorer = make(name, **options).in_process()
    assert scorer.gold(PROMPT) == gold
    assert scorer(PROMPT, "answer: 42" if gold is None else gold).reward == 1.0
    assert scorer(PROMPT, "41").reward == 0.0
