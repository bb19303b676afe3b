import pytest

from astraflow.client.rank import RankClient
from astraflow.client.trainer import TrainerClient
from astraflow.core.batches import BatchOutcome, EndCause, EndOfData, StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import Contract, RegisterTrainer

REGISTER = RegisterTrainer(
    policy_id="solver", name="trainer", contract=Contract(), groups_per_batch=1
)


@pytest.fixture
def lead(loop, hub):
    """Rank 0, which has the session."""
    with TrainerClient(
        hub=hub.address, token="join-secret", register=REGISTER, loop=loop
    ) as client:
        yield client


@pytest.fixture
def tokens(lead):
    """Tokens of the sessions that rank 0 had, the newest one last."""
    tokens = []
    lead.on_session(lambda session: tokens.append(session.token))
    return tokens


@pytest.fixture
def rank(loop, hub, tokens):
    share = StreamBatches(rank=1, world_size=2, max_tokens=0, max_outstanding=2)
    with RankClient(
        hub=hub.address, loop=loop, session_token=tokens[-1], share=share, patience_s=5
    ) as rank:
        yield rank


def test_a_rank_takes_the_batch_that_rank_0_takes_and_drops_older_ones(hub, rank, tell, make_batch):
    for number in (1, 2):
        tell(hub.offer, *make_batch(number, parts=number))
    batch = rank.take("b2")
    assert (batch.header.batch_id, len(batch.parts)) == ("b2", 2)
    rank.release("b2")
    assert not hub.acks


def test_a_rank_goes_on_with_the_session_that_rank_0_opened_again(
    hub, lead, rank, tokens, tell, make_batch
):
    tell(hub.offer, *make_batch(1))
    rank.take("b1")
    tell(hub.expire)
    tell(hub.cut, "StreamBatches")
    lead.ack("b1", BatchOutcome.CONSUMED, step=1)
    assert len(tokens) == 2
    rank.release("b1")
    rank.renew(tokens[-1])
    tell(hub.offer, *make_batch(2))
    assert rank.take("b2").header.batch_id == "b2"


def test_a_batch_that_never_comes_is_lost(hub, rank, tell):
    tell(hub.end_data, EndOfData(cause=EndCause.STEP_LIMIT, batch_count=0))
    with pytest.raises(AstraflowError, match="rank 1 was not sent its share of b7") as caught:
        rank.take("b7")
    assert caught.value.reason is Reason.LEASE_LOST


def test_a_rank_of_a_hub_that_is_gone_says_so(loop, tokens):
    share = StreamBatches(rank=1, world_size=2, max_tokens=0, max_outstanding=1)
    with (
        RankClient(
            hub="127.0.0.1:1", loop=loop, session_token=tokens[-1], share=share, patience_s=0.1
        ) as rank,
        pytest.raises(AstraflowError) as caught,
    ):
        rank.take("b1")
    assert caught.value.reason is Reason.NOT_READY
