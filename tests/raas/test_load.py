from astraflow.core.clock import ManualClock
from astraflow.engines.protocol import EngineLoad
from astraflow.raas.metrics import LoadMeter


def engine_load(sampled, *, kv_fraction=0.0, queued=0):
    return EngineLoad(
        running_count=0,
        queued_count=queued,
        sampled_token_count=sampled,
        kv_fraction=kv_fraction,
        busy_s=0.0,
    )


def test_waiting_is_the_time_without_a_request():
    clock = ManualClock()
    meter = LoadMeter(clock)
    clock.advance(2.0)
    with meter:
        with meter:
            clock.advance(1.0)
        clock.advance(3.0)
    clock.advance(2.0)
    load = meter.report([engine_load(80)], inflight_count=0, queued_count=0, capacity=8)
    assert load.wait_fraction == 0.5
    assert load.tokens_per_s == 10.0
    clock.advance(1.0)
    load = meter.report([engine_load(80)], inflight_count=0, queued_count=0, capacity=8)
    assert (load.wait_fraction, load.tokens_per_s) == (1.0, 0.0)


def test_engines_are_summed_up():
    clock = ManualClock()
    meter = LoadMeter(clock)
    clock.advance(1.0)
    engines = [engine_load(10, kv_fraction=0.25, queued=1), engine_load(30, kv_fraction=0.5)]
    load = meter.report(engines, inflight_count=5, queued_count=2, capacity=8)
    assert load.tokens_per_s == 40.0
    assert (load.kv_fraction, load.engine_queued_count) == (0.5, 1)
    assert (load.inflight_count, load.queued_count, load.capacity) == (5, 2, 8)
