import json
import sys
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from astraflow.storage.lines import LineWriter


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_arrive_in_order_in_their_files(tmp_path):
    writer = LineWriter()
    for number in range(3000):
        writer.write(tmp_path / f"{number % 2}.jsonl", {"number": number})
    writer.close()
    assert [row["number"] for row in read(tmp_path / "0.jsonl")] == list(range(0, 3000, 2))
    assert [row["number"] for row in read(tmp_path / "1.jsonl")] == list(range(1, 3000, 2))


def test_a_flush_makes_lines_readable(tmp_path):
    writer = LineWriter()
    writer.write(tmp_path / "deep" / "a.jsonl", {"text": "übung"})
    writer.flush()
    assert read(tmp_path / "deep" / "a.jsonl") == [{"text": "übung"}]
    writer.close()


def test_half_of_a_surrogate_pair_is_the_replacement_character(tmp_path):
    writer = LineWriter()
    for prompt in ("x\ud83d", "x\ufffd"):
        writer.write(tmp_path / "a.jsonl", {"prompt": [prompt], "at": tmp_path, "seen": 0.5})
    writer.close()
    cut, whole = (tmp_path / "a.jsonl").read_bytes().splitlines()
    assert cut == whole


def test_lines_are_appended_to_what_is_there(tmp_path):
    for number in range(2):
        writer = LineWriter()
        writer.write(tmp_path / "a.jsonl", {"number": number})
        writer.close()
    assert read(tmp_path / "a.jsonl") == [{"number": 0}, {"number": 1}]


def test_a_closed_writer_forgets_what_comes(tmp_path):
    writer = LineWriter()
    writer.close()
    writer.close()
    writer.write(tmp_path / "a.jsonl", {})
    assert not (tmp_path / "a.jsonl").exists()


def test_a_file_that_cannot_be_written_fails_the_close_and_no_other_file(tmp_path):
    (tmp_path / "taken").write_text("")
    writer = LineWriter()
    writer.write(tmp_path / "taken" / "a.jsonl", {})
    writer.write(tmp_path / "b.jsonl", {"fine": True})
    with pytest.raises(OSError, match="taken"):
        writer.close()
    assert read(tmp_path / "b.jsonl") == [{"fine": True}]


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /dev/full")
def test_a_full_disk_fails_the_flush_and_the_close_and_no_other_file(tmp_path):
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    writer = LineWriter()
    writer.write(tmp_path / "full.jsonl", {"n": 1})
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    writer.write(tmp_path / "b.jsonl", {"fine": True})
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert read(tmp_path / "b.jsonl") == [{"fine": True}]


def test_a_full_disk_is_told_when_it_is_met(tmp_path):
    """To flush and to close may be days later."""
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    lines = LineWriter()
    with capture_logs() as logs:
        for number in range(3):
            lines.write(path, {"number": number})
            with suppress(OSError):
                lines.flush()
    (told,) = logs
    assert told["log_level"] == "error"
    assert told["path"] == str(path)
    assert "No space left" in told["why"]
    with suppress(OSError):
        lines.close()


def test_a_torn_last_line_is_cut_before_the_next_one(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"n": 1}\n{"n": 2, "text": "' + "x" * 70_000)
    lines = LineWriter()
    lines.write(path, {"n": 3})
    lines.close()
    assert read(path) == [{"n": 1}, {"n": 3}]
