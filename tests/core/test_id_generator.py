from astraflow.core.ids import IdGenerator


def test_ids_of_a_kind_are_counted():
    mint = IdGenerator("run-1")
    assert [mint.next("task"), mint.next("task"), mint.next("group")] == [
        "task-run-1-0",
        "task-run-1-1",
        "group-run-1-0",
    ]


def test_what_was_minted_is_known_without_a_list():
    mint = IdGenerator("run-1")
    name = mint.next("group")
    assert mint.has_issued("group", name)
    assert not mint.has_issued("task", name)
    for other in ("group-run-1-1", "group-run-2-0", "group-run-1-00", "group-run-1--0", "", "x"):
        assert not mint.has_issued("group", other)
