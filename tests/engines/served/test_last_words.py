"""A log of many lines is told by the errors in it and by its end."""

from astraflow.engines.served.server import last_words

SAID = """\
starting
(Worker pid=7) ERROR 11-22 00:20:56 [core.py:12] Traceback (most recent call last):
(Worker pid=7) ERROR 11-22 00:20:56 [core.py:12]   File "core.py", line 3
(Worker pid=7) ERROR 11-22 00:20:56 [core.py:12] torch.OutOfMemoryError: no room for 9 GiB
ValueError: no room for 9 GiB
ValueError: no room for 9 GiB
"""
END = "RuntimeError: see above"


def test_errors_that_stand_far_above_are_told_once_and_first():
    said = last_words(SAID + "waiting\n" * 40 + END).splitlines()
    assert said[:4] == [
        "torch.OutOfMemoryError: no room for 9 GiB",
        "ValueError: no room for 9 GiB",
        END,
        "...",
    ]
    assert said[4:] == ["waiting"] * 14 + [END]


def test_a_short_log_is_told_whole():
    assert last_words("one\ntwo\n") == "one\ntwo"
