from astraflow.client.trainer_session import TrainerLoadMeter
from astraflow.core.clock import ManualClock


def test_load_is_measured_between_two_reports():
    clock = ManualClock()
    meter = TrainerLoadMeter(clock)
    with meter.waiting():
        clock.advance(3.0)
    meter.start_batch("b1", 700)
    assert meter.report().held_batch_count == 1
    clock.advance(7.0)
    meter.end_batch("b1", step=4, is_trained=True)
    load = meter.report()
    assert (load.step, load.held_batch_count) == (4, 0)
    assert load.tokens_per_s == 100.0
    assert load.wait_fraction == 0.0


def test_a_wait_in_progress_counts():
    clock = ManualClock()
    meter = TrainerLoadMeter(clock)
    clock.advance(1.0)
    with meter.waiting():
        clock.advance(3.0)
        assert meter.report().wait_fraction == 0.75
        clock.advance(1.0)
    assert meter.report().wait_fraction == 1.0
