import pytest
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.agents.messages import normal_messages
from astraflow.workflows.agents.template import PLAIN, ChatTemplate
from tests.workflows.agents.conftest import ENDS, raw_tokenizer, template_of, tokenizer_for


@pytest.mark.parametrize("name", ["chatml", "smollm2"])
def test_a_template_that_leaves_answers_alone_has_nothing_to_tell(name):
    assert template_of(name).check.warnings == ()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("headers", "strips the white space"),
        ("brackets", "changes the text around"),
        ("turns", "drops the thinking"),
        ("qwen3_like", "drops the thinking"),
    ],
)
def test_a_template_that_rewrites_answers_is_named_with_what_to_do(name, what):
    told = template_of(name).check.warnings
    assert what in told[0]
    assert "policies.*.model.chat_template" in told[0]


def test_an_empty_thought_before_every_answer_is_noticed():
    source = template_of("qwen3_like").source
    silent = ChatTemplate(source, variables={"enable_thinking": False})
    assert "changes the text around" in silent.check.warnings[0]


@pytest.mark.parametrize(
    ("source", "need", "why"),
    [
        (PLAIN, "tools", "leaves them out"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "system", "out"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "system",
            "no system",
        ),
        ("<user>{{ messages[-1].content }}", "history", "an earlier answer"),
    ],
)
def test_what_a_template_does_not_take_is_refused(source, need, why):
    with pytest.raises(AstraflowError, match=why) as caught:
        ChatTemplate(source).check.require("user", need)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert "name another template" in caught.value.message


def test_a_template_that_loses_what_users_say_is_an_error():
    with pytest.raises(AstraflowError, match="what a user says"):
        _ = ChatTemplate("nothing").check


@pytest.mark.parametrize("name", ENDS)
def test_the_token_that_ends_an_answer_is_found(name):
    end = template_of(name).turn_end_id(tokenizer_for(name))
    assert end == raw_tokenizer().token_to_id(ENDS[name])


def test_a_text_that_ends_an_answer_is_no_token():
    plain = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert plain.turn_end_id(tokenizer_for("chatml")) is None


def test_roles_that_a_model_without_a_template_loses_are_told_once():
    plain, chat = ChatTemplate(), [{"role": r, "content": r} for r in ("system", "user")]
    with structlog.testing.capture_logs() as logs:
        assert plain.render(chat[1:]) == "user"
        assert logs == []
        assert {plain.render(chat), plain.render(chat)} == {"systemuser"}
    assert len(logs) == 1
    assert "no chat template" in logs[0]["event"]


def test_without_a_template_of_its_own_a_model_reads_what_the_plain_one_gives():
    chat = [{"role": "user", "content": "{{ a }}\n"}, {"role": "assistant", "content": "b"}]
    commented = ChatTemplate(PLAIN + "{# not the plain one #}")
    assert ChatTemplate().render(chat) == commented.render(chat) == "{{ a }}\nb"


def test_marks_for_the_masks_of_other_libraries_change_nothing():
    marked = ChatTemplate(
        "{% for m in messages %}{{ m.role }}:"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert marked.render(chat) == "user:a;assistant:b;"


def test_json_is_written_as_a_template_wants_it():
    """GLM-4.5 says ensure_ascii itself."""
    message = {"role": "user", "content": "é<"}
    for options, said in (
        ("", "é<"),
        ("ensure_ascii=False", "é<"),
        ("ensure_ascii=true", "\\u00e9<"),
    ):
        template = ChatTemplate(f"{{{{ messages[0].content | tojson({options}) }}}}")
        assert template.render([message]) == f'"{said}"'


def test_a_template_that_stumbles_over_a_message_says_so():
    stumbling = ChatTemplate("{{ messages[0].content.splitlines()[7] + 1 }}")
    with pytest.raises(AstraflowError, match="refuses the messages"):
        stumbling.render([{"role": "user", "content": "a"}])


SYSTEM, USER, LATE = (
    {"role": role, "content": text}
    for role, text in (("system", "rules"), ("user", "ask"), ("system", "more rules"))
)
SAID = {"role": "assistant", "content": "done"}


def test_system_messages_where_a_template_takes_none_are_shown_as_the_users():
    template = template_of("turns")
    with structlog.testing.capture_logs() as logs:
        first = template.render([SYSTEM, LATE, USER, LATE])
        assert first == template.render(
            [
                {"role": "system", "content": "rules\n\nmore rules"},
                USER,
                {"role": "user", "content": "more rules"},
            ]
        )
    assert [each["event"].partition(";")[0] for each in logs] == [
        "the chat template takes a system message at the beginning only"
    ]
    assert template.tail([SYSTEM, LATE, USER, SAID, LATE], 3) == template.tail(
        [SYSTEM, USER, SAID, {"role": "user", "content": "more rules"}], 2
    )


@pytest.mark.parametrize("name", ["chatml", "headers"])
def test_system_messages_stay_where_a_template_takes_them(name):
    text = template_of(name).render([SYSTEM, USER, SAID, LATE])
    assert "system" in text.partition("done")[2]


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_a_message_that_says_nothing_is_refused_with_the_keys_it_has(role):
    with pytest.raises(AstraflowError, match=r"messages\[1\].content is missing") as caught:
        normal_messages([{"role": "user", "content": None}, {"role": role, "text": "hello"}])
    assert "role, text" in caught.value.message
    assert normal_messages([{"role": "assistant", "tool_calls": []}])[0]["content"] == ""
