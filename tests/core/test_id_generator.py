from astraflow.core.ids import IdGenerator


def test_ids_of_a_kind_are_counted():
    ids = IdGenerator("run-1")
    assert [ids.next("task"), ids.next("task"), ids.next("group")] == [
        "task-run-1-0",
        "task-run-1-1",
        "group-run-1-0",
    ]


def test_what_was_issued_is_known_without_a_list():
    ids = IdGenerator("run-1")
    name = ids.next("group")
    assert ids.has_issued("group", name)
    assert not ids.has_issued("task", name)
    for other in ("group-run-1-1", "group-run-2-0", "group-run-1-00", "group-run-1--0", "", "x"):
        assert not ids.has_issued("group", other)
    assert not ids.has_issued("group", "group-run-1-" + "9" * 5000)
