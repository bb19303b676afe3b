import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import MemberId
from astraflow.rpc.access import HubTokens, SessionTokens, token_digest


def test_each_token_opens_its_own_door():
    tokens = HubTokens(join="j", operator="ö")
    assert tokens.may_join("j")
    assert not tokens.may_join("ö")
    assert tokens.may_operate("ö")
    assert not tokens.may_operate("")


def test_minted_tokens_differ_and_are_not_shown():
    first, second = HubTokens.generate(), HubTokens.generate()
    assert len({first.join, first.operator, second.join, second.operator}) == 4
    assert first.join not in repr(first)


def test_a_token_speaks_for_its_member():
    sessions = SessionTokens()
    token = sessions.generate()
    sessions.bind(token_digest(token), MemberId("m-1"))
    assert sessions.speaks_for(token) == "m-1"


def test_a_token_of_elsewhere_is_refused():
    with pytest.raises(AstraflowError) as caught:
        SessionTokens().speaks_for(b"x" * 32)
    assert caught.value.reason is Reason.TOKEN_INVALID


def test_a_process_that_reopens_its_session_may_use_both_tokens():
    sessions = SessionTokens()
    older, newer = sessions.generate(), sessions.generate()
    for token in (older, newer):
        sessions.bind(token_digest(token), MemberId("m-1"))
    assert sessions.speaks_for(older) == sessions.speaks_for(newer) == "m-1"


def test_a_replaced_process_is_fenced_and_its_token_still_names_the_member():
    sessions = SessionTokens()
    older, newer = sessions.generate(), sessions.generate()
    sessions.bind(token_digest(older), MemberId("m-1"))
    sessions.fence(MemberId("m-1"))
    sessions.bind(token_digest(newer), MemberId("m-1"))
    assert sessions.owner_of(older) == sessions.speaks_for(newer) == "m-1"
    with pytest.raises(AstraflowError) as caught:
        sessions.speaks_for(older)
    assert caught.value.reason is Reason.SESSION_FENCED


def test_an_ended_session_is_refused_until_it_is_opened_again():
    sessions = SessionTokens()
    token = sessions.generate()
    sessions.bind(token_digest(token), MemberId("m-1"))
    sessions.end(MemberId("m-1"), "silent for 10 s")
    with pytest.raises(AstraflowError, match="silent for 10 s") as caught:
        sessions.speaks_for(token)
    assert caught.value.reason is Reason.SESSION_ENDED
    assert sessions.speaks_for(token, may_be_ended=True) == "m-1"
    sessions.bind(token_digest(sessions.generate()), MemberId("m-1"))
    assert sessions.speaks_for(token) == "m-1"
