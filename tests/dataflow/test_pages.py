import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.dataflow.servicers.operator import page_of


def page(items, token="", *, size=2, selection=b"all"):
    return page_of(items, key=str, size=size, token=token, selection=selection)


def test_pages_cover_a_list_once():
    items, token, seen = list(range(5)), "", []
    while True:
        part, token = page(items, token)
        seen += part
        if not token:
            break
    assert seen == items


def test_what_comes_at_the_front_does_not_disturb_the_next_page():
    _, token = page([3, 2, 1])
    assert page([5, 4, 3, 2, 1], token) == ([1], "")


def test_a_list_whose_old_end_is_gone_has_no_next_page():
    _, token = page([5, 4, 3])
    assert page([9, 8], token) == ([], "")


def test_a_token_of_another_selection_is_refused():
    _, token = page([3, 2, 1])
    with pytest.raises(AstraflowError) as caught:
        page([3, 2, 1], token, selection=b"some")
    assert caught.value.reason is Reason.INVALID_FIELD


def test_sizes_have_bounds():
    items = list(range(2000))
    assert len(page(items, size=0)[0]) == 50
    assert len(page(items, size=5000)[0]) == 1000


def test_an_empty_list_is_one_empty_page():
    assert page([]) == ([], "")
