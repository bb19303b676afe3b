import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.auth import (
    TRANSFER_KEY,
    bearer,
    bearer_of,
    is_same_secret,
    require_secret,
    secret_of,
    session_metadata,
    transfer_metadata,
)


class Caller:
    def __init__(self, metadata=None):
        self._metadata = metadata

    def invocation_metadata(self):
        return self._metadata


class TestSecret:
    def test_equal_secrets_are_the_same_whatever_their_type(self):
        assert is_same_secret("abc", b"abc")
        assert not is_same_secret("abc", "abd")
        assert not is_same_secret("abc", "abcd")

    def test_nothing_equals_an_empty_secret(self):
        assert not is_same_secret("", "")
        assert not is_same_secret(b"", b"")

    def test_the_current_and_the_older_one_pass(self):
        caller = Caller(transfer_metadata(b"old"))

        require_secret(caller, TRANSFER_KEY, b"new", b"old")

    @pytest.mark.parametrize(
        ("metadata", "says"),
        [
            (None, "is missing"),
            (session_metadata(b"new"), "is missing"),
            (transfer_metadata(b"older"), "is not the right one"),
            (((TRANSFER_KEY, "new"),), "is missing"),
        ],
    )
    def test_others_do_not_pass(self, metadata, says):
        with pytest.raises(AstraflowError, match=says) as caught:
            require_secret(Caller(metadata), TRANSFER_KEY, b"new")

        assert caught.value.reason is Reason.TOKEN_INVALID
        assert "new" not in str(caught.value)

    def test_no_secret_is_read_as_an_empty_one(self):
        assert secret_of(Caller(), TRANSFER_KEY) == b""


class TestBearer:
    def test_is_read_as_it_was_written(self):
        assert bearer_of(Caller(bearer("join-me"))) == "join-me"

    def test_scheme_may_be_in_any_case(self):
        assert bearer_of(Caller((("authorization", "BEARER  t "),))) == "t"

    @pytest.mark.parametrize("value", ["Basic t", "t", b"Bearer t"])
    def test_other_schemes_are_none(self, value):
        assert bearer_of(Caller((("authorization", value),))) == ""
