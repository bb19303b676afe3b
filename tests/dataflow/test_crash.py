"""Real processes of a run are killed; whatever was acknowledged is there in the end.

`benchmarks/crash.py` kills ten times as many.
"""

from random import Random

import pytest

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
    report = crash_run(tmp_path / "run", kills, chance=Random(8), compact_nbytes=1 << 16)
    assert sum(report.kills.values()) == 4
    assert not report.verdict.faults
    assert not report.missed


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
