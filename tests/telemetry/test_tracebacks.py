import asyncio
import json
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.telemetry.tracebacks import (
    MAX_NBYTES,
    bounded,
    place_of,
    place_of_definition,
    place_of_stack,
)

FILE = Path(__file__).name


def line_of(mark):
    """Return the number of the line of this file that has a mark."""
    lines = Path(__file__).read_text().splitlines()
    return next(
        n for n, line in enumerate(lines, 1) if f"# {mark}" in line and "line_of" not in line
    )


def told(code, *arguments):
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever it raises
        code(*arguments)
    return place_of(caught.value)


def reads_json():
    return json.loads("{")  # reads


def wraps():
    try:
        reads_json()
    except ValueError as error:
        raise AstraflowError(Reason.SCORER_FAILED, "no verdict") from error


def raises_with(message):
    raise ValueError(message)


def test_it_ends_in_the_line_of_the_user_and_not_in_the_library_below():
    place = told(reads_json)
    assert place.cause == f"JSONDecodeError at {FILE}:{line_of('reads')}"
    assert place.is_users
    lines = place.traceback.splitlines()
    assert f'File "{__file__}", line {line_of("reads")}, in reads_json' in place.traceback
    assert 'return json.loads("{")' in place.traceback
    assert "calls deeper" in lines[-2]
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")


def test_an_error_of_ours_is_told_as_what_it_was_made_of():
    assert told(wraps).cause == f"JSONDecodeError at {FILE}:{line_of('reads')}"


def test_an_error_that_arose_below_the_users_code_is_told_where_that_called():
    def deep():
        inner = OSError("of a library, without a frame")
        raise AstraflowError(Reason.ENGINE_FAILED, "gone") from inner  # deep

    assert told(deep).cause == f"ENGINE_FAILED at {FILE}:{line_of('deep')}"


def test_an_error_that_was_raised_from_itself_is_told_once():
    def again():
        error = AstraflowError(Reason.SCORER_FAILED, "no verdict")
        raise error from error  # again

    place = told(again)
    assert place.cause == f"SCORER_FAILED at {FILE}:{line_of('again')}"
    assert "from" not in place.traceback.splitlines()[-1]

    first, second = TimeoutError("first"), TimeoutError("second")
    first.__cause__, second.__cause__ = second, first
    assert "first" in place_of(first).traceback


async def test_a_time_out_is_told_where_it_interrupted():
    async def waits():
        await asyncio.Event().wait()  # waits

    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.001):
            await waits()
    assert place_of(caught.value).cause == f"Timeout at {FILE}:{line_of('waits')}"


async def test_who_awaits_what_was_cancelled_is_told_that_and_of_no_time():
    async def waits_for_another():
        other = asyncio.ensure_future(asyncio.Event().wait())
        other.cancel()
        await other  # in vain

    with pytest.raises(asyncio.CancelledError) as caught:
        await waits_for_another()
    place = place_of(caught.value)
    assert place.cause == f"CancelledError at {FILE}:{line_of('in vain')}"
    assert "time" not in place.traceback.splitlines()[-1]


def test_an_error_that_says_its_place_is_believed():
    error = AstraflowError(Reason.SCORER_FAILED, "of another process", cause="c", traceback="t")
    place = place_of(error)
    assert (place.cause, place.traceback) == ("c", "t")


def test_nothing_of_it_is_large():
    assert len(told(raises_with, "x" * 10**6).traceback) < 1500

    def falls(depth):
        return falls(depth - 1) if depth else raises_with("é" * 600)

    place = told(falls, 200)
    assert len(place.traceback.encode()) <= MAX_NBYTES
    assert place.traceback.splitlines()[-1].startswith("ValueError: é")
    assert len(bounded("y" * 10**6)) < 700


def test_code_that_returned_the_wrong_thing_is_told_where_it_is_defined():
    for thing in (reads_json, partial(reads_json)):
        place = place_of_definition(thing, name="str returned", said="not a number")
        assert place.cause == f"str returned at {FILE}:{line_of('reads') - 1}"
        assert place.traceback.endswith("def reads_json():\nnot a number")

    class Made:
        def __call__(self):  # made
            return None

    assert place_of_definition(Made(), name="None", said="").cause.endswith(f":{line_of('made')}")
    assert not place_of_definition(len, name="None", said="odd").is_users


def test_where_a_thread_is_can_be_told():
    is_there, may_go = threading.Event(), threading.Event()

    def stands():
        is_there.set()
        may_go.wait()  # stands

    thread = threading.Thread(target=stands)
    thread.start()
    is_there.wait()
    place = place_of_stack(sys._current_frames()[thread.ident], name="Blocked", said="stands")
    may_go.set()
    thread.join()
    assert place.cause == f"Blocked at {FILE}:{line_of('stands')}"
