import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.policy.accounting import Books
from astraflow.core.status import DropCount, RolloutPlace


def test_samples_move_and_the_books_balance():
    books = Books("solver")
    books.issue(8)
    books.move(RolloutPlace.IN_FLIGHT, RolloutPlace.WAITING, 5)
    books.drop(RolloutPlace.IN_FLIGHT, Reason.ENGINE_FAILED, 2)
    books.drop(RolloutPlace.WAITING, Reason.FILTERED, by="no_trajectory")
    account = books.account()
    assert account.is_balanced
    assert (account.issued_count, account.in_flight_count, account.waiting_count) == (8, 1, 4)
    assert account.drops == (
        DropCount(reason=Reason.ENGINE_FAILED, count=2),
        DropCount(reason=Reason.FILTERED, filter="no_trajectory", count=1),
    )


def test_what_is_not_there_cannot_move():
    books = Books("solver")
    books.issue(1)
    with pytest.raises(AstraflowError, match="INTERNAL"):
        books.move(RolloutPlace.FRESH, RolloutPlace.LEASED)
