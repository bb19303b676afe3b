"""Every call of the hub, made by everybody: only those are let in whom the table names."""

import asyncio

import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from astraflow.core.errors import Reason
from astraflow.rpc.auth import bearer, session_metadata
from astraflow.rpc.errors import raised_from
from astraflow_proto.control.v1 import control_service_pb2, ledger_service_pb2
from astraflow_proto.dataflow.v1 import (
    raas_service_pb2,
    session_service_pb2,
    trainer_service_pb2,
)
from astraflow_proto.evals.v1 import eval_service_pb2
from astraflow_proto.weights.v1 import version_service_pb2

SERVICES = [
    file.DESCRIPTOR.services_by_name[name]
    for file, name in (
        (raas_service_pb2, "RaasService"),
        (trainer_service_pb2, "TrainerService"),
        (version_service_pb2, "VersionService"),
        (eval_service_pb2, "EvalService"),
        (ledger_service_pb2, "LedgerService"),
        (control_service_pb2, "ControlService"),
        # Last: it ends the sessions.
        (session_service_pb2, "SessionService"),
    )
]
NODES = {"join", "node", "relay"}
TRAINERS = {"join", "trainer", "trainer:solver"}
MEMBERS = {"a node's session", "a trainer's session", "a relay's session"}
READERS, OPERATORS = {"reader", "operator"}, {"operator"}

LET_IN = {
    "JoinPool": NODES,
    "StreamTasks": {"a node's session"},
    "StreamRollouts": {"a node's session"},
    "RegisterTrainer": TRAINERS,
    "StreamBatches": {"a trainer's session"},
    "AckBatch": {"a trainer's session"},
    "PublishVersion": {"a trainer's session"},
    "ListVersions": MEMBERS | READERS,
    "WatchVersions": MEMBERS,
    "ListSources": MEMBERS | READERS,
    "ReportVersion": MEMBERS,
    "RequestPublish": {"a node's session"},
    "CreateEvalRun": MEMBERS | OPERATORS,
    "GetEvalRun": MEMBERS | READERS,
    "WatchEvalRun": MEMBERS | READERS,
    "CancelEvalRun": MEMBERS | OPERATORS,
    "ListEvalSuites": MEMBERS | READERS,
    "GetLedger": READERS,
    "ListRollouts": READERS,
    "ListDeadLetters": READERS,
    "RequeuePrompt": OPERATORS,
    "ExplainWait": READERS,
    "GetRun": READERS,
    "WatchRun": READERS,
    "PauseRun": OPERATORS,
    "ResumeRun": OPERATORS,
    "DrainMember": OPERATORS,
    "RevokeToken": OPERATORS,
    "SaveRun": OPERATORS,
    "StopRun": OPERATORS,
    "GetScaleAdvice": READERS,
    "KeepAlive": MEMBERS,
    "ReportFailure": MEMBERS,
    "EndSession": MEMBERS,
}


@pytest.fixture
async def scene(start_hub, recipe_of):
    async with start_hub(recipe_of()) as hub:
        yield hub


# A field that no message has: what is large is read after its caller is known.
LARGE = bytes([0xFA, 0x3F, 0x80, 0x80, 0x08]) + bytes(1 << 17)


@pytest.mark.parametrize("more", [b"", LARGE], ids=["small", "large"])
async def test_only_those_are_let_in_whom_the_table_names(scene, more):
    node, trainer = scene.raas(), scene.trainer()
    await trainer.register()
    # What is watched says something at once.
    await trainer.publish()
    await node.join()
    tokens = scene.tokens
    relay = scene.raas(name="relay")
    await relay.join(token=tokens.of_role("relay"))
    roles = ("node", "relay", "trainer", "trainer:solver", "trainer:other", "reader", "operator")
    callers = {
        "nobody": (),
        "a stranger": bearer("guess"),
        "join": bearer(tokens.join),
        **{role: bearer(tokens.of_role(role)) for role in roles},
        "a stranger's session": session_metadata(b"x" * 32),
        "a node's session": session_metadata(node.token),
        "a trainer's session": session_metadata(trainer.token),
        "a relay's session": session_metadata(relay.token),
    }
    let_in = {
        method.name: {
            who
            for who, metadata in callers.items()
            if await _is_let_in(scene, method, metadata, more)
        }
        for service in SERVICES
        for method in service.methods
    }
    assert let_in == LET_IN


async def _is_let_in(scene, method, metadata, more) -> bool:
    """Whether a call gets further than to who makes it."""
    request = GetMessageClass(method.input_type)()
    if "policy_id" in method.input_type.fields_by_name:
        request.policy_id = "solver"
    make = getattr(
        scene.channel,
        f"{'stream' if method.client_streaming else 'unary'}"
        f"_{'stream' if method.server_streaming else 'unary'}",
    )
    call = make(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString() + more,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    given = () if method.client_streaming else (request,)
    try:
        async with asyncio.timeout(60):
            called = call(*given, metadata=metadata)
            if method.client_streaming:
                await called.done_writing()
            if method.server_streaming:
                await called.read()
                called.cancel()
            else:
                await called
    except aio.AioRpcError as error:
        return raised_from(error).reason not in (Reason.TOKEN_INVALID, Reason.ROLE_NOT_ALLOWED)
    return True
