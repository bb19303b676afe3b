from concurrent.futures import ThreadPoolExecutor

import pytest

from astraflow.client.batch_stream import ReceivedBatch
from astraflow.client.shelf import Shelf
from astraflow.core.batches import EndCause, EndOfData
from astraflow.core.errors import AstraflowError, Reason

THE_END = EndOfData(cause=EndCause.STEP_LIMIT, batch_count=1)


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def batch(make_batch):
    def make(number):
        header, parts = make_batch(number)
        return ReceivedBatch(header=header, parts=parts)

    return make


def taken(shelf):
    batch = shelf.take()
    return None if batch is None else batch.header.batch_id


def test_who_waits_is_nudged_and_waits_on(shelf, batch):
    nudges = []

    def on_nudge():
        nudges.append(len(nudges))
        shelf.put(batch(1))

    shelf.nudge()
    assert shelf.take(on_nudge).header.batch_id == "b1"
    assert nudges == [0]


def test_what_waits_is_handed_out_before_the_end(shelf, batch):
    shelf.put(batch(1))
    shelf.end(THE_END)
    assert taken(shelf) == "b1"
    assert taken(shelf) is None
    assert shelf.end_of_data == THE_END


def test_a_batch_is_shelved_once_whether_it_waits_is_out_or_settled(shelf, batch):
    shelf.put(batch(1))
    shelf.put(batch(1))
    assert taken(shelf) == "b1"
    shelf.put(batch(1))
    shelf.settle("b1")
    shelf.put(batch(1))
    shelf.put(batch(2))
    assert taken(shelf) == "b2"


def test_held_are_those_that_wait_and_those_that_are_out(shelf, batch):
    for number in (1, 2, 3):
        shelf.put(batch(number))
    taken(shelf)
    assert set(shelf.held) == {"b1", "b2", "b3"}
    shelf.settle("b1")
    shelf.keep(("b3",))
    assert shelf.held == ("b3",)


def test_closing_wakes_who_waits(shelf):
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(shelf.take)
        shelf.close()
        assert waiting.result() is None


def test_closing_with_an_error_raises_it(shelf, batch):
    shelf.put(batch(1))
    shelf.close(AstraflowError(Reason.SESSION_FENCED, "a newer process took over"))
    with pytest.raises(AstraflowError, match="newer process"):
        shelf.take()
