import asyncio

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.errors import is_answer, raised_from

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
LOST = AstraflowError(Reason.LEASE_LOST, "batch b7 is gone", metadata={"batch_id": "b7"})


class Raises:
    """All kinds of methods raise one error; streams answer by `write` or as generators."""

    def __init__(self, error):
        self.error = error

    async def unary_unary(self, request, context):
        raise self.error

    async def stream_unary(self, requests, context):
        async for _ in requests:
            raise self.error

    async def unary_stream(self, request, context):
        yield b"first"
        raise self.error

    async def stream_stream(self, requests, context):
        await context.write(b"first")
        raise self.error


async def failed(call, kind) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(kind)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_arrives_as_it_was_raised(serve, kind):
    async with serve(Raises(LOST)) as call:
        error = await failed(call, kind)

    arrived = raised_from(error)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert arrived.to_failure() == LOST.to_failure()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_defect_is_internal_and_logged_with_its_trace(serve, kind):
    with capture_logs() as logs:
        async with serve(Raises(KeyError("k"))) as call:
            error = await failed(call, kind)

    assert error.code() is grpc.StatusCode.INTERNAL
    assert raised_from(error).reason is Reason.INTERNAL
    assert isinstance(logs[0]["exc_info"], KeyError)
    assert logs[0]["method"] == f"/test.Echo/{kind}"


async def test_a_task_group_does_not_hide_an_error(serve):
    class Grouped:
        async def unary_unary(self, request, context):
            async with asyncio.TaskGroup() as group:
                group.create_task(self.lose())

        async def lose(self):
            raise LOST

    async with serve(Grouped()) as call:
        error = await failed(call, "unary_unary")

    assert raised_from(error).reason is Reason.LEASE_LOST


async def test_a_task_group_with_a_defect_in_it_is_a_defect(serve):
    group = ExceptionGroup("two", [LOST, ValueError("v")])
    with capture_logs() as logs:
        async with serve(Raises(group)) as call:
            error = await failed(call, "unary_unary")

    assert raised_from(error).reason is Reason.INTERNAL
    assert logs


async def test_abort_of_the_servicer_passes(serve):
    class Aborts:
        async def unary_unary(self, request, context):
            await context.abort(grpc.StatusCode.ABORTED, "replaced")

    async with serve(Aborts()) as call:
        error = await failed(call, "unary_unary")

    assert error.code() is grpc.StatusCode.ABORTED
    assert not is_answer(error)


async def test_cancellation_reaches_the_servicer(serve):
    begun, cleaned = asyncio.Event(), asyncio.Event()

    class Waits:
        async def unary_stream(self, request, context):
            try:
                yield b"first"
                begun.set()
                await asyncio.Event().wait()
            finally:
                cleaned.set()

    with capture_logs() as logs:
        async with serve(Waits()) as call, asyncio.TaskGroup() as group:
            calling = group.create_task(call("unary_stream"))
            await begun.wait()
            calling.cancel()
            await cleaned.wait()

    assert not logs


async def test_what_is_lacking_says_so_by_name(serve):
    async with serve(object()) as call:
        errors = [await failed(call, kind) for kind in KINDS]

    assert {error.code() for error in errors} == {grpc.StatusCode.UNIMPLEMENTED}
    assert [raised_from(error).metadata for error in errors] == [{"capability": k} for k in KINDS]


async def test_a_good_answer_passes(serve):
    class Echo:
        async def unary_unary(self, request, context):
            return request

        async def unary_stream(self, request, context):
            await context.write(request)
            await context.write(request)

        async def stream_unary(self, requests, context):
            return b"".join([each async for each in requests])

        async def stream_stream(self, requests, context):
            async for each in requests:
                yield each

    async with serve(Echo()) as call:
        answers = [await call(kind, b"hi") for kind in KINDS]

    assert answers == [[b"hi"], [b"hi", b"hi"], [b"hi"], [b"hi"]]
