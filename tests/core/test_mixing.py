from astraflow.core.algorithms.curation import Mixing
from astraflow.core.settings import MixPhaseSettings


def chosen(mixing, count, there=("easy", "hard")):
    names = []
    for _ in range(count):
        names.append(mixing.choose(there))
        mixing.counts[names[-1]] += 1
    return names


def test_shares_are_kept_at_any_time():
    mixing = Mixing([MixPhaseSettings(weights={"easy": 3, "hard": 1})])
    assert chosen(mixing, 8) == ["easy", "easy", "hard", "easy"] * 2
    assert mixing.metrics() == {"data/mix/easy": 0.75, "data/mix/hard": 0.25}


def test_a_schedule_changes_weights_with_the_version():
    mixing = Mixing(
        [
            MixPhaseSettings(weights={"hard": 1}, from_version=10),
            MixPhaseSettings(weights={"easy": 1}),
        ]
    )
    assert chosen(mixing, 2) == ["easy", "easy"]
    mixing.begin_version(9)
    assert chosen(mixing, 1) == ["easy"]
    mixing.begin_version(10)
    assert chosen(mixing, 2) == ["hard", "hard"]
    assert mixing.metrics() == {"data/mix/hard": 1}


def test_what_is_through_leaves_its_share_to_the_others():
    mixing = Mixing([MixPhaseSettings(weights={"easy": 3, "hard": 1})])
    assert chosen(mixing, 2, there=["hard"]) == ["hard", "hard"]
    assert mixing.weights(["easy", "hard"]) == {"easy": 0.75, "hard": 0.25}


def test_what_has_no_weight_comes_last():
    mixing = Mixing([MixPhaseSettings(weights={"easy": 1, "hard": 0})])
    assert chosen(mixing, 3) == ["easy"] * 3
    assert chosen(mixing, 1, there=["hard"]) == ["hard"]
