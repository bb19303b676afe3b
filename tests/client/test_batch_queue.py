from concurrent.futures import ThreadPoolExecutor

import pytest

from astraflow.client.batch_stream import ItemQueue, PublishOrder, SaveOrder, TrainerBatch
from astraflow.core.batches import EndCause, EndOfData
from astraflow.core.errors import AstraflowError, Reason

THE_END = EndOfData(cause=EndCause.STEP_LIMIT, batch_count=1)


@pytest.fixture
def queue():
    return ItemQueue()


@pytest.fixture
def batch(make_batch):
    def make(number):
        header, parts = make_batch(number)
        return TrainerBatch(header=header, parts=parts)

    return make


def taken(queue):
    batch = queue.take()
    return None if batch is None else batch.header.batch_id


def test_orders_come_before_batches_and_once_while_they_wait(queue, batch):
    queue.put(batch(1))
    for order in (PublishOrder(), SaveOrder("mine"), PublishOrder()):
        queue.put(order)
    assert [queue.take(), queue.take()] == [PublishOrder(), SaveOrder("mine")]
    assert taken(queue) == "b1"
    queue.put(PublishOrder())
    queue.put(THE_END)
    assert queue.take() == PublishOrder()
    assert queue.take() is None


def test_what_waits_is_handed_out_before_the_end(queue, batch):
    queue.put(batch(1))
    queue.put(THE_END)
    assert taken(queue) == "b1"
    assert taken(queue) is None
    assert queue.end_of_data == THE_END


def test_a_batch_is_queued_once_whether_it_waits_is_out_or_discarded(queue, batch):
    queue.put(batch(1))
    queue.put(batch(1))
    assert taken(queue) == "b1"
    queue.put(batch(1))
    queue.discard("b1")
    queue.put(batch(1))
    queue.put(batch(2))
    assert taken(queue) == "b2"


def test_held_are_those_that_wait_and_those_that_are_out(queue, batch):
    for number in (1, 2, 3):
        queue.put(batch(number))
    taken(queue)
    assert set(queue.name_held()) == {"b1", "b2", "b3"}
    queue.discard("b1")
    queue.keep(("b3",))
    assert queue.name_held() == ("b3",)


def test_a_batch_that_comes_after_those_were_named_that_are_held_is_not_trained_on(queue, batch):
    assert queue.name_held() == ()
    queue.put(batch(1))
    queue.put(SaveOrder("mine"))
    queue.keep(())
    queue.put(batch(2))
    assert [queue.take(), taken(queue)] == [SaveOrder("mine"), "b2"]


def test_closing_wakes_who_waits(queue):
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(queue.take)
        queue.close()
        assert waiting.result() is None


def test_closing_with_an_error_raises_it(queue, batch):
    queue.put(batch(1))
    queue.close(AstraflowError(Reason.SESSION_FENCED, "a newer process took over"))
    with pytest.raises(AstraflowError, match="newer process"):
        queue.take()
