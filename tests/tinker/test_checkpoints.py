"""Checkpoints: names that are no paths, and folders that are whole or not there."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.tinker.checkpoints import (
    SAMPLER,
    SNAPSHOT,
    STATE,
    CheckpointPath,
    TinkerCheckpoints,
)

MODEL = "session-1:train:0"


class Now:
    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def opened(tmp_path, now):
    return lambda base_model="base": TinkerCheckpoints(tmp_path, base_model=base_model, now=now)


def writing(text):
    return lambda draft: (draft / "weights").write_text(text)


def read(checkpoints, place):
    return (checkpoints.find(place) / "weights").read_text()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "a\0b", "ä", "x" * 129, "a\n"]
)
def test_a_name_that_could_leave_the_folder_is_refused(name):
    with pytest.raises(AstraflowError) as refused:
        CheckpointPath.of(MODEL, STATE, name)
    assert refused.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        f"{MODEL}/weights/a",
        f"tinker://{MODEL}/weights/a/b",
        f"tinker://{MODEL}/snapshots/000000001",
        "tinker://../weights/a",
        f"tinker://{MODEL}/../weights",
        f"tinker://{MODEL}/weights/..",
        f"file://{MODEL}/weights/a",
    ],
)
def test_a_path_that_is_none_is_refused(path):
    with pytest.raises(AstraflowError) as refused:
        CheckpointPath.parse(path)
    assert refused.value.reason is Reason.INVALID_FIELD


def test_a_path_is_that_of_its_place():
    for place in (
        CheckpointPath.of(MODEL, STATE, "final"),
        CheckpointPath.of(MODEL, SAMPLER, "000020"),
    ):
        assert CheckpointPath.parse(place.path) == place


def test_what_was_saved_is_found_and_not_replaced_unless_it_may(opened):
    checkpoints, place = opened(), CheckpointPath.of(MODEL, STATE, "a")
    checkpoints.save(place, writing("one"))
    with pytest.raises(AstraflowError) as refused:
        checkpoints.save(place, writing("two"))
    assert refused.value.reason is Reason.NAME_TAKEN
    assert read(opened(), place) == "one"
    checkpoints.save(place, writing("two"), overwrite=True)
    assert read(opened(), place) == "two"
    with pytest.raises(AstraflowError) as refused:
        opened("another").find(place)
    assert refused.value.reason is Reason.MODEL_MISMATCH


def test_what_failed_half_way_is_not_there(opened, tmp_path):
    def fails(draft):
        writing("half")(draft)
        raise OSError("the disk is full")

    checkpoints, place = opened(), CheckpointPath.of(MODEL, STATE, "a")
    with pytest.raises(OSError, match="full"):
        checkpoints.save(place, fails)
    with pytest.raises(AstraflowError) as refused:
        checkpoints.find(place)
    assert refused.value.reason is Reason.CHECKPOINT_UNKNOWN
    assert not list((tmp_path / MODEL / "weights").iterdir())


def test_what_a_kill_left_half_replaced_is_as_it_was(opened, tmp_path):
    checkpoints, place = opened(), CheckpointPath.of(MODEL, STATE, "a")
    checkpoints.save(place, writing("one"))
    folder = tmp_path / MODEL / "weights"
    (folder / "a").rename(folder / ".a.17.old")
    (folder / ".a.17.draft").mkdir()
    assert read(opened(), place) == "one"
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_what_has_expired_is_gone_and_its_name_stays(opened, now, tmp_path):
    checkpoints, place = opened(), CheckpointPath.of(MODEL, SAMPLER, "a")
    checkpoints.save(place, writing("one"), ttl_s=60)
    now.seconds += 59
    assert read(opened(), place) == "one"
    now.seconds += 1
    with pytest.raises(AstraflowError) as refused:
        checkpoints.find(place)
    assert refused.value.reason is Reason.CHECKPOINT_UNKNOWN
    assert not (tmp_path / place.relative / "weights").exists()
    with pytest.raises(AstraflowError) as refused:
        checkpoints.save(place, writing("two"))
    assert refused.value.reason is Reason.NAME_TAKEN


def test_a_sampling_session_is_found_again(opened):
    place = CheckpointPath.of(MODEL, SNAPSHOT, "000000003")
    for name, found in (("session-1:sample:0", place), ("session-1:sample:1", None)):
        opened().put_sampler(name, found)
        assert opened().sampler(name) == found
    for strange in ("session-1:sample:2", "../session-1"):
        with pytest.raises(AstraflowError):
            opened().sampler(strange)


def test_a_sampling_session_that_is_asked_for_again_meanwhile_is_begun_once(opened):
    checkpoints = opened()
    checkpoints.put_sampler("session-1:sample:0", None)
    with ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(call)
            for _ in range(100)
            for call in (
                lambda: checkpoints.put_sampler("session-1:sample:0", None),
                lambda: checkpoints.sampler("session-1:sample:0"),
            )
        ]
    assert {each.result() for each in asked} == {None}
