"""What a converter takes from names and types, and what it refuses when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import RegisteredCode
from astraflow.wire.converters import FieldRule, converter, least, sized
from astraflow_proto.common.v1 import model_pb2
from astraflow_proto.control.v1 import run_pb2
from astraflow_proto.dataflow.v1 import raas_service_pb2, session_service_pb2
from astraflow_proto.rollout.v1 import batch_pb2


@dataclass(frozen=True, kw_only=True)
class Adapter:
    base_digest: bytes
    base_name: str = ""
    peft_config_json: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Credit:
    most: int
    max_eval_outstanding: int | None = None
    max_eval_extra: int = 0


def made(**rules):
    rules = {"most": FieldRule(name="max_outstanding")} | rules
    return converter(Credit, raas_service_pb2.TaskCredit, **rules)


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Let every test make the same converter."""
    monkeypatch.setattr("astraflow.wire.converters._PAIRS", {})


def test_a_field_of_the_dataclass_alone_is_refused():
    @dataclass(frozen=True)
    class More(Adapter):
        rank: int = 0

    with pytest.raises(TypeError, match=r"More and .*Adapter: the message lacks rank"):
        converter(More, model_pb2.Adapter)


def test_a_field_of_the_message_alone_is_refused():
    @dataclass
    class Less:
        base_digest: bytes

    with pytest.raises(TypeError, match=r"lacks \['base_name', 'peft_config_json'\]"):
        converter(Less, model_pb2.Adapter)

    encode, _ = converter(Less, model_pb2.Adapter, without={"base_name", "peft_config_json"})
    assert encode(Less(b"d")) == model_pb2.Adapter(base_digest=b"d")


@pytest.mark.parametrize("hint", [str, bytes, float, timedelta, Adapter, tuple[int, ...]])
def test_a_field_of_another_type_is_refused(hint):
    kind = dataclass(type("End", (), {"__annotations__": {"cause": str, "batch_count": hint}}))

    with pytest.raises(TypeError, match="batch_count is no"):
        converter(kind, batch_pb2.EndOfData, without={"cause"})


def test_a_dataclass_has_one_converter():
    converter(Adapter, model_pb2.Adapter)

    with pytest.raises(TypeError, match="Adapter is converted before its converter is made"):
        converter(Adapter, model_pb2.Adapter)


def test_a_nested_message_that_is_empty_is_there():
    @dataclass
    class Identity:
        adapter: Adapter | None

    digests = {"name", "config_digest", "tokenizer_digest", "chat_template_digest"}
    encode, decode = converter(Identity, model_pb2.ModelIdentity, without=digests)

    empty = Identity(Adapter(base_digest=b""))
    assert encode(empty).HasField("adapter")
    assert decode(encode(empty)) == empty
    assert decode(encode(Identity(None))) == Identity(None)


def test_none_goes_with_an_optional_field_that_is_unset():
    encode, decode = made()

    assert not encode(Credit(most=1)).HasField("max_eval_outstanding")
    for bound in (None, 0, 7):
        credit = Credit(most=1, max_eval_outstanding=bound)
        assert decode(encode(credit)) == credit


def test_checks_name_the_field_of_the_message():
    _, decode = made(
        most=FieldRule(name="max_outstanding", check=least(1)), max_eval_outstanding=least(2)
    )

    assert decode(raas_service_pb2.TaskCredit(max_outstanding=1)) == Credit(most=1)
    for name, sent in {
        "max_outstanding": {},
        "max_eval_outstanding": {"max_outstanding": 1, "max_eval_outstanding": 1},
    }.items():
        with pytest.raises(AstraflowError) as caught:
            decode(raas_service_pb2.TaskCredit(**sent))
        assert caught.value.reason is Reason.INVALID_FIELD
        assert caught.value.metadata == {"field": name}


def test_bytes_have_a_size_or_are_empty_where_they_may_be():
    _, decode = converter(
        Adapter, model_pb2.Adapter, base_digest=sized(2), peft_config_json=sized(3, or_none=True)
    )

    assert decode(model_pb2.Adapter(base_digest=b"12")) == Adapter(base_digest=b"12")
    for fields in ({}, {"base_digest": b"12", "peft_config_json": b"1"}):
        with pytest.raises(AstraflowError, match=r"needs \d bytes"):
            decode(model_pb2.Adapter(**fields))


def test_a_property_is_sent_and_not_read():
    @dataclass
    class Epochs:
        epochs: Mapping[str, int] = field(default_factory=dict)

        @property
        def size(self) -> int:
            return len(self.epochs)

    others = {each.name for each in run_pb2.Run.DESCRIPTOR.fields} - {"epochs"}
    encode, decode = converter(
        Epochs,
        run_pb2.Run,
        without=others - {"dead_letter_count"},
        size=FieldRule(name="dead_letter_count"),
    )

    assert encode(Epochs({"a": 3})).dead_letter_count == 1
    assert decode(encode(Epochs({"a": 3}))) == Epochs({"a": 3})


def test_what_is_wrong_with_the_whole_is_said_by_its_check():
    def refuse(adapter):
        raise ValueError(adapter.base_name)

    _, decode = converter(Adapter, model_pb2.Adapter, check=refuse)

    with pytest.raises(ValueError, match="llama"):
        decode(model_pb2.Adapter(base_name="llama"))


def test_a_member_of_a_oneof_goes_by_the_name_of_its_class():
    @dataclass
    class Other:
        step: int

    @dataclass
    class Load:
        load: Other | None

    with pytest.raises(TypeError, match="no member of the oneof is a Other"):
        converter(Load, session_service_pb2.KeepAliveRequest)


def test_a_repeated_field_of_more_items_than_there_may_be_is_refused_before_one_is_read():
    @dataclass(frozen=True, kw_only=True)
    class Deltas:
        codes: tuple[RegisteredCode, ...]

    _, decode = converter(
        Deltas,
        raas_service_pb2.JoinPoolRequest,
        codes=FieldRule(most=2),
        without=set(raas_service_pb2.JoinPoolRequest.DESCRIPTOR.fields_by_name) - {"codes"},
    )
    request = raas_service_pb2.JoinPoolRequest(codes=[{"name": "one"}, {"name": "two"}])
    assert [each.name for each in decode(request).codes] == ["one", "two"]
    # Without a name, which is not looked at any more.
    request.codes.add()
    with pytest.raises(AstraflowError, match="codes: 3 are more than 2"):
        decode(request)
