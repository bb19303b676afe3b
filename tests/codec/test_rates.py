"""Rates are measured once, and say what a patch costs in proportion."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from astraflow.codec import kernels
from astraflow.codec.chunks import Profile
from astraflow.codec.rates import DecodeRate, _measured, cpu_s_of, measured_rates


def test_every_level_is_measured_once(level):
    rates = measured_rates()

    assert measured_rates() is rates
    assert set(rates.decode) == set(rates.encode_bytes_per_s) == set(Profile)
    for profile, rate in rates.decode.items():
        assert rate.profile is profile
        numbers = (rate.model_bytes_per_s, rate.payload_bytes_per_s, rate.whole_bytes_per_s)
        assert all(0 < each < float("inf") for each in numbers)


def test_many_that_ask_at_once_have_it_measured_once():
    _measured.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        together = Barrier(8)
        asked = [pool.submit(lambda: together.wait() is None or measured_rates()) for _ in range(8)]
    assert len({id(each.result()) for each in asked}) == 1


@pytest.mark.skipif(len(kernels.levels()) < 2, reason="there is one level")
def test_levels_have_rates_of_their_own():
    found = []
    for level in kernels.levels()[:2]:
        with kernels.forced(level):
            found.append(measured_rates())

    assert found[0] != found[1]


def test_where_the_clock_of_a_thread_stands_still_the_seconds_that_pass_are_taken(monkeypatch):
    monkeypatch.setattr("astraflow.codec.rates.thread_time", lambda: 1.0)
    assert cpu_s_of(lambda: sum(range(1000))) > 0


def test_a_patch_costs_a_pass_and_its_payload_and_a_version_all_of_it():
    rate = DecodeRate(
        profile=Profile.FAST, model_bytes_per_s=1e9, payload_bytes_per_s=1e8, whole_bytes_per_s=5e8
    )

    assert rate.seconds(10**9, 10**8, is_whole=False) == 2
    assert rate.seconds(10**9, 10**8, is_whole=True) == 2
    assert rate.seconds(10**9, 0, is_whole=False) == 1
