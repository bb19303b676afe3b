"""astraflow.common.v1: failures, members, sessions; and why somebody waits."""

from collections.abc import Iterable

from astraflow.core.errors import Failure
from astraflow.core.members import (
    Capability,
    Contract,
    Directive,
    ModelIdentity,
    RaasLoad,
    Resources,
    Session,
    SessionResume,
    TrainerLoad,
)
from astraflow.core.status import WaitReason
from astraflow.wire.converters import FieldRule, converter, least, sized
from astraflow.wire.fields import EnumTable, required
from astraflow_proto.common.v1 import failure_pb2, member_pb2, model_pb2, session_pb2
from astraflow_proto.dataflow.v1 import wait_pb2

CAPABILITIES = EnumTable(Capability, session_pb2.Capability, "CAPABILITY")

encode_failure, decode_failure = converter(Failure, failure_pb2.Failure)

converter(
    Resources,
    member_pb2.Resources,
    accelerator_count=least(0),
    core_count=least(0),
    memory_nbytes=least(0),
)

encode_raas_load, decode_raas_load = converter(RaasLoad, member_pb2.RaasLoad)

encode_trainer_load, decode_trainer_load = converter(TrainerLoad, member_pb2.TrainerLoad)

_DIGEST = sized(32, or_none=True)

converter(
    ModelIdentity,
    model_pb2.ModelIdentity,
    without={"adapter"},
    config_digest=_DIGEST,
    tokenizer_digest=_DIGEST,
    chat_template_digest=_DIGEST,
)


def _encode_capabilities(capabilities: Iterable[Capability]) -> list[int]:
    return sorted(CAPABILITIES.encode(each) for each in capabilities)


def _decode_capabilities(numbers: Iterable[int]) -> frozenset[Capability]:
    """Read capabilities; one that is unknown here is ignored, as the contract says."""
    known = {number: member for member, number in CAPABILITIES.numbers.items()}
    return frozenset(known[number] for number in numbers if number in known)


encode_contract, decode_contract = converter(
    Contract,
    session_pb2.Contract,
    capabilities=FieldRule(encode=_encode_capabilities, decode=_decode_capabilities),
)

converter(SessionResume, session_pb2.SessionResume, incarnation=least(1))

converter(Session, session_pb2.Session, member_id=required)

encode_directive, decode_directive = converter(Directive, session_pb2.Directive)

encode_wait_reason, decode_wait_reason = converter(WaitReason, wait_pb2.WaitReason)
