import pytest
from pydantic import ValidationError

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.prompts import PromptOptions, fill, go_on, show_prompt


def row(**fields):
    return Prompt(prompt_id="train/1", data_set="train", fields=fields)


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{a} + {a}", "2 + 2"),
        (r"\boxed{} {} {a}", r"\boxed{} {} 2"),
        ('{"x": {a}, "y": [{a}]}', '{"x": 2, "y": [2]}'),
        ("{{a}} {{other}}", "{a} {other}"),
        ('{{"a": 1}}', '{{"a": 1}}'),
        ("{two words}", "x"),
        ("{list} {tree}", '[1, "é"] {"k": null}'),
        ("{braces}", "{a}"),
        ("{0} {a b} {\na\n}", "{0} {a b} {\na\n}"),
    ],
)
def test_fields_are_filled_in_and_other_braces_stay(text, filled):
    fields = {"a": 2, "two words": "x", "list": [1, "é"], "tree": {"k": None}, "braces": "{a}"}
    assert fill(text, row(**fields)) == filled


def test_a_name_that_is_no_field_is_an_error_that_names_the_fields():
    with pytest.raises(AstraflowError, match=r"train/1 has no field 'x', only a, b; .*\{\{x\}\}"):
        fill(r"\boxed{x}", row(a=1, b=2))


@pytest.mark.parametrize(("hole", "name"), [(None, "null"), (float("nan"), "NaN")])
def test_a_field_that_is_a_hole_is_an_error_that_names_the_row(hole, name):
    with pytest.raises(AstraflowError, match=f"train/1 has {name} in its field 'a'") as failed:
        fill("{b} {a}", row(a=hole, b=2))
    assert failed.value.metadata == {"field": "a"}


def test_what_a_workflow_adds_comes_before_the_rows_own():
    assert fill("{answer}", row(answer="gold"), answer="mine") == "mine"


@pytest.mark.parametrize(
    ("options", "fields", "messages"),
    [
        ({}, {"prompt": "hi"}, [user("hi")]),
        (
            {"system": "Be {how}."},
            {"prompt": "hi", "how": "brief"},
            [{"role": "system", "content": "Be brief."}, user("hi")],
        ),
        (
            {
                "messages": [
                    user("1 + 1?"),
                    {"role": "assistant", "content": "2"},
                    user("{question}"),
                ]
            },
            {"question": "3 + 4?", "messages": [user("of the row")]},
            [user("1 + 1?"), {"role": "assistant", "content": "2"}, user("3 + 4?")],
        ),
        ({}, {"messages": [user("{not a field}")], "prompt": "x"}, [user("{not a field}")]),
        (
            {"system": "ours"},
            {"messages": [{"role": "system", "content": "theirs"}, user("hi")]},
            [{"role": "system", "content": "theirs"}, user("hi")],
        ),
        ({}, {"messages": "no list", "prompt": "hi"}, [user("hi")]),
    ],
)
def test_a_row_becomes_a_chat(parrot, episode, options, fields, messages):
    talk = episode(solver=parrot(), fields=fields).trajectory()
    show_prompt(talk, PromptOptions.model_validate(options), row(**fields))
    assert list(talk.messages) == messages


def test_a_row_becomes_text(parrot, episode):
    talk = episode(solver=parrot()).trajectory()
    show_prompt(talk, PromptOptions(text="1 + 1 = 2\n{prompt} ="), row(prompt="3 + 4"))
    assert (talk.text, talk.messages) == ("1 + 1 = 2\n3 + 4 =", ())


def test_a_row_whose_messages_end_with_the_answer_is_an_error(parrot, episode):
    talk = episode(solver=parrot()).trajectory()
    messages = [user("hi"), {"role": "assistant", "content": "hello"}]
    with pytest.raises(AstraflowError, match="ends with an answer") as caught:
        show_prompt(talk, PromptOptions(), row(messages=messages))
    assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"text": "x", "system": "y"}, "not both"),
        ({"text": "x", "messages": [user("y")]}, "not both"),
        ({"messages": [user("x"), {"role": "assistant", "content": "y"}]}, "ends with the assis"),
        ({"messages": [{"role": "robot", "content": "y"}]}, "role"),
        ({"template": "x"}, "template"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, problem):
    with pytest.raises(ValidationError, match=problem):
        PromptOptions.model_validate(options)


async def test_more_is_told_as_the_trajectory_began(parrot, episode):
    for options in (PromptOptions(), PromptOptions(text="{prompt}")):
        talk = episode(solver=parrot("a")).trajectory()
        show_prompt(talk, options, row(prompt="hi"))
        await talk.sample()
        go_on(talk, "again")
        assert talk.text == "hiaagain"
    assert talk.messages == ()
