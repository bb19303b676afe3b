import time

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import MemberId
from astraflow.rpc.access import (
    Grant,
    HubTokens,
    SessionTokens,
    TokenRole,
    token_digest,
    token_id_of,
)


def test_each_token_opens_its_own_door():
    tokens = HubTokens(join="j", operator="ö")
    assert tokens.grant("j").roles == {TokenRole.NODE, TokenRole.TRAINER}
    assert tokens.grant("ö").roles == {TokenRole.OPERATOR, TokenRole.READER}
    assert tokens.grant("") is tokens.grant("other") is None


@pytest.mark.parametrize(
    "role", ["node", "relay", "reader", "operator", "trainer", "trainer:solver"]
)
def test_a_token_of_a_role_says_which_to_whoever_has_the_operators_token(role):
    token = HubTokens(join="j", operator="o").of_role(role)
    assert HubTokens(join="another", operator="o").grant(token) == Grant.parse(role)
    assert HubTokens(join="j", operator="another").grant(token) is None


def test_there_are_no_other_roles():
    for role in ("", "node:solver", "root", "trainers"):
        with pytest.raises(AstraflowError) as caught:
            HubTokens.generate().of_role(role)
        assert caught.value.reason is Reason.INVALID_FIELD


def test_a_token_that_was_changed_opens_nothing():
    tokens = HubTokens.generate()
    token = tokens.of_role("node")
    for place in range(len(token)):
        for letter in "Aa0-":
            changed = token[:place] + letter + token[place + 1 :]
            # The last letter has bits that say nothing.
            if changed != token and place < len(token) - 1:
                assert tokens.grant(changed) is None
    assert tokens.grant(token[:-1]) is None


def test_a_token_expires():
    tokens = HubTokens.generate()
    assert tokens.grant(tokens.of_role("node", expire_time=time.time() + 60)) is not None
    with pytest.raises(AstraflowError, match="expired") as caught:
        tokens.grant(tokens.of_role("node", expire_time=time.time() - 1))
    assert caught.value.reason is Reason.TOKEN_INVALID


def test_a_token_has_an_id_that_its_bearer_can_read():
    tokens = HubTokens.generate()
    first, second = tokens.of_role("node"), tokens.of_role("node")
    assert token_id_of(first) == tokens.grant(first).token_id != token_id_of(second)
    assert token_id_of(token_id_of(first)) == token_id_of(first)
    for none in ("", "0123", "0123456G", "0123456789", "af1.", "af1.AAAA", tokens.join):
        with pytest.raises(AstraflowError) as caught:
            token_id_of(none)
        assert caught.value.reason is Reason.INVALID_FIELD


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


def test_one_secret_for_both_does_all():
    grant = HubTokens(join="same", operator="same").grant("same")
    assert grant.roles == {
        TokenRole.TRAINER,
        TokenRole.NODE,
        TokenRole.READER,
        TokenRole.OPERATOR,
    }
