"""Every event survives the journal, and what cannot be read says so."""

from datetime import UTC, datetime
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.core import events as ev
from astraflow.core.batches import AckBatch, StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import RegisterTrainer, SessionResume
from astraflow.core.tasks import TaskCredit
from astraflow.wire.journal import RunOpened, read_record, record_bytes, with_decision
from astraflow.wire.rollout import encode_rollout
from astraflow.wire.snapshot import dump_state, load_state

from .test_round_trips import built, same, strategy_of

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
KINDS = [*get_args(ev.Event), RunOpened]
SECRETS = ev.SessionSecrets(token=b"digest", transfer_token=b"")


@st.composite
def entries(draw, kind):
    """One event, its secrets as the journal keeps them."""
    if kind not in (ev.RaasJoined, ev.TrainerRegistered):
        if kind is StreamBatches:
            return draw(built(kind, rank=st.just(1), world_size=st.just(4)))
        return draw(built(kind) if kind in (AckBatch, TaskCredit) else strategy_of(kind))
    drawn = built(kind, secrets=st.just(SECRETS))
    event = draw(drawn)
    resume = draw(st.none() | built(SessionResume, resume_token=st.just(b"")))
    request = type(event.request)(
        **{name: getattr(event.request, name) for name in event.request.__slots__}
        | {"resume": resume}
    )
    return type(event)(request=request, secrets=SECRETS, resumes=event.resumes)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_every_event_comes_back(kind, data):
    entry = data.draw(entries(kind))
    goes_on = data.draw(st.booleans())
    record = record_bytes(entry, NOW, goes_on=goes_on)
    again = read_record(record)
    assert same(entry, again.entry)
    assert (again.time, again.goes_on, again.decision) == (NOW, goes_on, None)
    assert read_record(with_decision(record, 7)).decision == 7


@given(data=st.data())
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
def test_a_token_to_resume_with_stays_out_of_the_journal(data):
    resume = SessionResume(resume_token=b"an old secret", incarnation=1)
    request = data.draw(built(RegisterTrainer, resume=st.just(resume)))
    event = ev.TrainerRegistered(request=request, secrets=SECRETS)
    assert b"an old secret" not in record_bytes(event, NOW)


@given(data=st.data())
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
def test_a_rollout_is_kept_as_it_was_received(data):
    event = data.draw(strategy_of(ev.RolloutArrived))
    record = record_bytes(event, NOW, received=encode_rollout(event.rollout).SerializeToString())
    assert same(event, read_record(record).entry)


@pytest.mark.parametrize("record", [b"", b"\xff\xff", b"\x0a\x00"])
def test_what_cannot_be_read_is_refused(record):
    with pytest.raises(AstraflowError, match="open it with the release that wrote it") as caught:
        read_record(record)
    assert caught.value.reason is Reason.JOURNAL_FAILED


def test_a_snapshot_reads_no_class_from_elsewhere():
    data = dump_state(ev.RunPaused(), position=3, modules=("astraflow.core.",))
    assert load_state(data, modules=("astraflow.core.",))[1] == 3
    with pytest.raises(AstraflowError, match="no part of a run's state"):
        load_state(data, modules=("elsewhere.",))


def test_a_snapshot_of_what_has_no_plain_value_is_refused():
    with pytest.raises(AstraflowError, match="no plain value"):
        dump_state([open], position=0, modules=("astraflow.core.",))
