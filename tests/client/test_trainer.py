from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import pytest
from grpc import StatusCode

from astraflow.client.loop_thread import LoopThread
from astraflow.client.trainer import DamageReport, PublishOrder, SaveOrder, TrainerClient
from astraflow.core.batches import AckBatch, BatchOutcome, EndCause, EndOfData
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import Contract, Directive, DirectiveKind, RegisterTrainer
from astraflow_proto.dataflow.v1 import trainer_service_pb2
from crash_ends.postgres import free_port
from made_up import made_up_version

REGISTER = RegisterTrainer(
    policy_id="solver", name="trainer", contract=Contract(), groups_per_batch=1
)
THE_END = EndOfData(cause=EndCause.STEP_LIMIT, batch_count=2)


@pytest.fixture
def client(loop, hub):
    with TrainerClient(
        hub=hub.address, token="join-secret", register=REGISTER, loop=loop
    ) as client:
        yield client


def test_batches_come_in_order_and_end_with_the_data(hub, client, tell, make_batch):
    for number in (1, 2):
        tell(hub.offer, *make_batch(number, parts=number))
    tell(hub.end_data, THE_END)
    seen = []
    for step, batch in enumerate(client.batches(), start=1):
        seen.append((batch.header.batch_id, len(batch.parts)))
        client.ack(batch.header.batch_id, BatchOutcome.CONSUMED, step=step, metrics={"loss": 0.5})
    assert seen == [("b1", 1), ("b2", 2)]
    assert client.end_of_data == THE_END
    assert [(ack.batch_id, ack.step, dict(ack.metrics)) for ack in hub.acks] == [
        ("b1", 1, {"loss": 0.5}),
        ("b2", 2, {"loss": 0.5}),
    ]


def test_a_cut_stream_is_opened_again_and_no_batch_is_given_twice(
    hub, client, tell, loop, make_batch
):
    tell(hub.offer, *make_batch(1))
    batches = client.batches(prefetch=2)
    first = next(batches)
    tell(hub.cut, "StreamBatches")
    loop.call(hub.until(lambda: hub.calls["StreamBatches open"] == 2))
    tell(hub.offer, *make_batch(2))
    client.ack("b1", BatchOutcome.CONSUMED, step=1)
    second = next(batches)
    assert (first.header.batch_id, second.header.batch_id) == ("b1", "b2")
    batches.close()


def test_a_batch_cut_in_the_middle_comes_whole(hub, client, tell, loop, make_batch):
    header, parts = make_batch(1, parts=3)
    batches = client.batches()
    hub.fail("StreamBatches", StatusCode.UNAVAILABLE)
    tell(hub.unsettled.__setitem__, "b1", (header, parts))
    assert [part.index for part in next(batches).parts] == [0, 1, 2]
    batches.close()


def test_an_ended_session_is_continued_with_what_is_held(hub, client, tell, make_batch):
    tell(hub.offer, *make_batch(1))
    batches = client.batches()
    next(batches)
    hub.held_batch_ids = ("b1",)
    tell(hub.expire)
    client.ack("b1", BatchOutcome.CONSUMED, step=1)
    resume = hub.registrations[-1].resume
    assert resume.resume_token == b"session-0"
    assert resume.incarnation == 1
    assert resume.held_batch_ids == ("b1",)
    assert [ack.batch_id for ack in hub.acks] == ["b1"]
    batches.close()


def offer_as_another_call_opens_the_session(hub, client, tell, loop, batch):
    loop.call(hub.until(lambda: hub.calls["StreamBatches open"] == 1))
    tell(hub.expire)
    client.publish_version(INFO)
    tell(hub.offer, *batch)


def test_a_batch_on_its_way_from_before_the_session_ended_is_passed_over(
    hub, client, tell, loop, make_batch
):
    # As when a process stood still while its session ended and the batch waited in its socket.
    batches = client.batches(prefetch=2)
    with ThreadPoolExecutor() as pool:
        taking = pool.submit(lambda: next(batches))
        offer_as_another_call_opens_the_session(hub, client, tell, loop, make_batch(1))
        tell(hub.unsettled.clear)
        tell(hub.cut, "StreamBatches")
        loop.call(hub.until(lambda: hub.calls["StreamBatches open"] == 2))
        tell(hub.offer, *make_batch(2))
        assert taking.result().header.batch_id == "b2"
    batches.close()


def test_a_batch_on_a_stream_from_before_the_session_was_opened_comes_again(
    hub, client, tell, loop, make_batch
):
    # As when another call opened the session while the stream was on its way to a new hub.
    batches = client.batches()
    with ThreadPoolExecutor() as pool:
        taking = pool.submit(lambda: next(batches))
        offer_as_another_call_opens_the_session(hub, client, tell, loop, make_batch(1))
        assert taking.result().header.batch_id == "b1"
    assert hub.calls["StreamBatches open"] == 2
    batches.close()


def test_a_hub_that_forgot_its_members_is_joined_afresh(hub, client, loop):
    loop.call(hub.restart(forgets=True))
    client.ack("b1", BatchOutcome.RETURNED, step=1)
    assert [request.resume for request in hub.registrations] == [None, None]


@pytest.mark.slow
def test_calls_wait_for_a_hub_that_restarts(hub, client, loop):
    hub.fail("AckBatch", StatusCode.UNAVAILABLE, times=6)
    assert client.ack("b1", BatchOutcome.CONSUMED, step=1)
    assert len(hub.acks) == 1


def test_the_next_version_is_returned(hub, client):
    assert client.publish_version(INFO) == 1
    assert hub.published == [INFO]


def test_an_answer_is_raised_as_it_was_given(hub, client):
    hub.fail("AckBatch", error=AstraflowError(Reason.LEASE_LOST, "b1 is held by another trainer"))
    with pytest.raises(AstraflowError, match="held by another trainer") as raised:
        client.ack("b1", BatchOutcome.CONSUMED, step=1)
    assert raised.value.reason is Reason.LEASE_LOST


INFO = made_up_version("solver", 0)
ACK = AckBatch(batch_id="b1", outcome=BatchOutcome.CONSUMED, step=1)


def test_a_save_is_asked_for_while_there_is_no_batch(hub, client, tell, make_batch):
    tell(hub.offer, *make_batch(1))
    items = client.items()
    next(items)
    client.ack("b1", BatchOutcome.CONSUMED, step=1)
    order = trainer_service_pb2.SaveOrder(checkpoint_id="mine")
    tell(hub.push, "StreamBatches", trainer_service_pb2.StreamBatchesResponse(save=order))
    assert next(items) == SaveOrder("mine")
    client.ack_later(replace(ACK, checkpoint_id="mine"))
    client.flush()
    tell(hub.offer, *make_batch(2))
    assert next(items).header.batch_id == "b2"
    assert [ack.checkpoint_id for ack in hub.acks] == ["", "mine"]
    items.close()


def test_what_is_asked_for_during_a_step_comes_before_the_next_batch(hub, client, tell, make_batch):
    tell(hub.offer, *make_batch(1))
    tell(hub.offer, *make_batch(2))
    items = client.items(prefetch=2)
    assert next(items).header.batch_id == "b1"
    doubt = trainer_service_pb2.VersionDoubt(version=3)
    tell(hub.push, "StreamBatches", trainer_service_pb2.StreamBatchesResponse(doubt=doubt))
    client.order_publish()
    found = list(islice(items, 3))
    assert PublishOrder() in found[:2]
    assert DamageReport(3) in found
    items.close()


def test_what_is_told_beside_training_comes_in_order(hub, client, tell, make_batch):
    tell(hub.offer, *make_batch(1))
    tell(hub.offer, *make_batch(2))
    batches = client.batches()
    next(batches)
    hub.fail("PublishVersion", StatusCode.UNAVAILABLE, times=2)
    heard = []
    client.announce(INFO, then=lambda: heard.append(len(hub.acks)))
    client.ack_later(ACK)
    assert next(batches).header.batch_id == "b2"
    client.flush()
    assert heard == [0]
    assert hub.published == [INFO]
    assert [ack.batch_id for ack in hub.acks] == ["b1"]
    batches.close()


def test_what_fails_beside_training_is_raised_where_the_trainer_waits(hub, client):
    refusal = AstraflowError(Reason.VERSION_NOT_NEXT, "0 does not follow 7")
    hub.fail("PublishVersion", error=refusal)
    client.announce(INFO)
    client.ack_later(ACK)
    with pytest.raises(AstraflowError, match="does not follow 7"):
        next(client.batches())
    with pytest.raises(AstraflowError, match="does not follow 7"):
        client.flush()
    assert not hub.acks


def test_a_fenced_trainer_gets_to_know_at_once(hub, client, tell):
    batches = client.batches()
    hub.sessions = dict.fromkeys(hub.sessions, Reason.SESSION_FENCED)
    with pytest.raises(AstraflowError) as raised:
        next(batches)
    assert raised.value.reason is Reason.SESSION_FENCED


def test_a_wrong_token_is_named(hub, loop):
    client = TrainerClient(hub=hub.address, token="guess", register=REGISTER, loop=loop)
    with pytest.raises(AstraflowError) as raised, client:
        pass
    assert raised.value.reason is Reason.TOKEN_INVALID


def test_an_unreachable_hub_is_named_with_what_to_check():
    address = f"127.0.0.1:{free_port()}"
    client = TrainerClient(hub=address, token="t", register=REGISTER, patience_s=0.2)
    with pytest.raises(AstraflowError, match=f"hub at {address}.*check that") as raised, client:
        pass
    assert raised.value.reason is Reason.NOT_READY


def test_leaving_ends_the_session(hub, loop):
    with TrainerClient(hub=hub.address, token="join-secret", register=REGISTER, loop=loop):
        pass
    assert hub.ends == ["the trainer leaves"]
    assert hub.calls["EndSession"] == 1


def test_keep_alive_tells_load_and_brings_orders_and_secrets(hub, loop, tell, make_batch):
    hub.keep_alive_interval = hub.keep_alive_interval / 3000
    secrets = []
    with TrainerClient(
        hub=hub.address, token="join-secret", register=REGISTER, loop=loop
    ) as client:
        client.on_transfer_token(secrets.append)
        batches = client.batches()
        tell(hub.offer, *make_batch(1))
        next(batches)
        client.ack("b1", BatchOutcome.CONSUMED, step=7)
        loop.call(hub.until(lambda: any(load.step == 7 for load in hub.loads)))
        hub.transfer_token = b"another"
        hub.directive = Directive(kind=DirectiveKind.STOP)
        assert list(batches) == []
        assert client.directive.kind is DirectiveKind.STOP
        assert client.end_of_data is None
    assert secrets == [b"transfer", b"another"]


def test_a_client_brings_its_own_loop(hub):
    with TrainerClient(hub=hub.address, token="join-secret", register=REGISTER) as client:
        assert client.registration.run_id == "run"
        assert client.transfer_token == b"transfer"


def test_a_loop_that_ends_wakes_who_waits_for_a_batch(hub):
    with LoopThread() as own, ThreadPoolExecutor() as pool:
        client = TrainerClient(hub=hub.address, token="join-secret", register=REGISTER, loop=own)
        with client:
            waiting = pool.submit(next, client.batches())
            own.close()
            with pytest.raises(AstraflowError) as caught:
                waiting.result(timeout=100)
    assert caught.value.reason is Reason.SESSION_ENDED
