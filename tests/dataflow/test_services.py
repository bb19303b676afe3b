"""Every call of the contract is served, or refused with a reason that names what is missing."""

import importlib
import pkgutil

import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode, aio

import astraflow_proto
from astraflow.core.errors import Reason
from astraflow.rpc.errors import is_answer, raised_from

LEFT_OUT = {
    "Pull": "pull",
    "ListLanes": "list_lanes",
    "GetLayout": "get_layout",
}


def methods():
    for module in pkgutil.walk_packages(astraflow_proto.__path__, "astraflow_proto."):
        if module.name.endswith("_service_pb2"):
            descriptor = importlib.import_module(module.name).DESCRIPTOR
            for service in descriptor.services_by_name.values():
                yield from service.methods


METHODS = {method.name: method for method in methods()}


async def ask(channel, method, metadata):
    """Call a method with an empty request; return what it is refused with, or None.

    A refusal that comes before the request is sent is lost in grpc.aio: asked once more then.
    """
    try:
        return await ask_once(channel, method, metadata)
    except aio.AioRpcError as error:
        if error.code() is not StatusCode.INTERNAL or not method.client_streaming:
            raise
        return await ask_once(channel, method, metadata)


async def ask_once(channel, method, metadata):
    request = GetMessageClass(method.input_type)()
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = ("stream" if method.client_streaming else "unary") + (
        "_stream" if method.server_streaming else "_unary"
    )
    call = getattr(channel, kind)(
        path,
        request_serializer=type(request).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    given = iter([request]) if method.client_streaming else request
    try:
        answer = call(given, metadata=metadata, timeout=100)
        if method.server_streaming:
            await answer.read()
            answer.cancel()
        else:
            await answer
    except aio.AioRpcError as error:
        if not is_answer(error):
            raise
        return raised_from(error)
    return None


def test_the_contract_has_all_its_services():
    assert len({method.containing_service.full_name for method in METHODS.values()}) == 8
    assert len(METHODS) == 37


async def test_every_call_is_served_or_names_what_is_missing(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        for name, method in METHODS.items():
            error = await ask(scene.channel, method, scene.operator)
            if name in LEFT_OUT:
                assert error.reason is Reason.CAPABILITY_MISSING, name
                assert error.metadata["capability"] == LEFT_OUT[name]
            elif error is not None:
                assert error.reason not in (Reason.CAPABILITY_MISSING, Reason.INTERNAL), name


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)])
async def test_no_served_call_lets_a_stranger_in(start_hub, recipe_of, metadata):
    async with start_hub(recipe_of()) as scene:
        for name in METHODS.keys() - LEFT_OUT:
            error = await ask(scene.channel, METHODS[name], metadata)
            assert error is not None, name
            assert error.reason is Reason.TOKEN_INVALID, name


async def test_a_session_token_of_elsewhere_is_refused(start_hub, recipe_of):
    metadata = (("astraflow-session-bin", b"x" * 32),)
    async with start_hub(recipe_of()) as scene:
        for name in ("KeepAlive", "EndSession", "StreamTasks", "StreamBatches", "ReportVersion"):
            error = await ask(scene.channel, METHODS[name], metadata)
            assert error is not None, name
            assert error.reason is Reason.TOKEN_INVALID, name


async def test_the_join_token_opens_no_control(start_hub, recipe_of):
    metadata = (("authorization", "Bearer join"),)
    async with start_hub(recipe_of()) as scene:
        for name in ("GetRun", "StopRun", "GetLedger", "ListEvalSuites"):
            error = await ask(scene.channel, METHODS[name], metadata)
            assert error is not None, name
            assert error.reason is Reason.ROLE_NOT_ALLOWED, name


async def test_a_raas_makes_no_calls_of_a_trainer(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        raas = scene.raas()
        await raas.join()
        for name in ("StreamBatches", "AckBatch", "PublishVersion"):
            error = await ask(scene.channel, METHODS[name], raas.metadata)
            assert error is not None, name
            assert error.reason is Reason.ROLE_NOT_ALLOWED, name
