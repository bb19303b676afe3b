"""Real processes of a run are killed; whatever was acknowledged is there in the end.

`benchmarks/crash.py` kills ten times as many.
"""

import json
from random import Random

import pytest

from astraflow.config.run_dir import RunDir
from astraflow.storage.fault_points import FaultPoint
from crash_ends.kills import Kill, Victim, draw_kills, kills_of_hubs
from crash_ends.run import crash_run, full_disk_run

pytestmark = pytest.mark.slow


def test_a_run_outlives_kills_at_named_places_and_at_any_time(tmp_path):
    chance = Random(7)
    kills = draw_kills(chance, points=11, hubs=2, nodes=1, trainers=2, compacting=False)
    report = crash_run(tmp_path / "run", kills, chance=chance)
    assert sum(report.kills.values()) == 18
    assert not report.verdict.faults
    assert not report.missed


def test_a_run_outlives_kills_around_its_snapshot(tmp_path):
    points = FaultPoint.SNAPSHOT_DRAFTED, FaultPoint.TRIM_STARTED
    kills = [Kill(victim=Victim.HUB, point=point) for point in points]
    report = crash_run(tmp_path / "run", kills, chance=Random(8), compact_nbytes=1 << 17)
    assert sum(report.kills.values()) == 4
    assert not report.verdict.faults
    assert not report.missed


def test_no_payload_that_is_named_is_removed_whatever_is_killed(tmp_path):
    pytest.importorskip("fsspec")
    points = FaultPoint.CARRIED_OUT_HALF, FaultPoint.JOURNAL_COMMITTED, FaultPoint.BATCH_SETTLED
    kills = [Kill(victim=Victim.HUB, point=point) for point in points]
    kills += [Kill(victim=victim, delay_s=0.3) for victim in (Victim.NODE, Victim.TRAINER)]
    report = crash_run(
        tmp_path / "run", kills, chance=Random(5), compact_nbytes=1 << 16, has_payloads=True
    )
    assert not report.verdict.faults
    (books,) = json.loads(RunDir(tmp_path / "run" / "run").status.read_text())["books"]
    assert "PAYLOAD_LOST" not in json.dumps(books)
    # The run is over: nothing is left of it.
    assert not [each for each in (tmp_path / "run" / "payloads").rglob("*") if each.is_file()]


@pytest.mark.long
def test_members_bear_a_hub_that_is_killed_every_second(tmp_path):
    kills = kills_of_hubs(3, every_s=1.0)
    report = crash_run(tmp_path / "run", kills, chance=Random(9))
    assert sum(report.kills.values()) == 5
    assert report.verdict.acked
    assert not report.verdict.faults


def test_a_hub_on_a_full_disk_acknowledges_nothing_and_goes_on_where_there_is_room(tmp_path):
    try:
        report = full_disk_run(tmp_path / "run")
    except PermissionError as error:
        pytest.skip(str(error))
    assert report.exit_codes == (1, 1)
    for words in report.last_words:
        assert "reason=JOURNAL_FAILED" in words
        assert "room" in words
    assert not report.verdict.faults
