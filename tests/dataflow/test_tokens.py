import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import MemberId
from astraflow.dataflow.tokens import HubTokens, SessionTokens


def test_each_token_opens_its_own_door():
    tokens = HubTokens(join="j", operator="ö")
    assert tokens.may_join("j")
    assert not tokens.may_join("ö")
    assert tokens.may_operate("ö")
    assert not tokens.may_operate("")


def test_minted_tokens_differ_and_are_not_shown():
    first, second = HubTokens.mint(), HubTokens.mint()
    assert len({first.join, first.operator, second.join, second.operator}) == 4
    assert first.join not in repr(first)


def test_a_token_speaks_for_its_member():
    sessions = SessionTokens()
    token = sessions.mint()
    sessions.bind(token, MemberId("m-1"))
    assert sessions.speaks_for(token) == "m-1"


def test_a_token_of_elsewhere_is_refused():
    with pytest.raises(AstraflowError) as caught:
        SessionTokens().speaks_for(b"x" * 32)
    assert caught.value.reason is Reason.TOKEN_INVALID


def test_an_older_token_is_fenced_and_still_names_its_member():
    sessions = SessionTokens()
    older, newer = sessions.mint(), sessions.mint()
    for token in (older, newer):
        sessions.bind(token, MemberId("m-1"))
    assert sessions.member_of(older) == sessions.speaks_for(newer) == "m-1"
    with pytest.raises(AstraflowError) as caught:
        sessions.speaks_for(older)
    assert caught.value.reason is Reason.SESSION_FENCED
