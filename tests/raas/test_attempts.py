"""What does not verify is tried a few times, what is not to be had until it is."""

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.raas.updater import Attempts
from astraflow.rpc.concurrency import Backoff


@pytest.fixture
def attempts():
    return Attempts(Backoff(first_s=0.1, limit_s=1.0))


def test_what_does_not_verify_is_tried_three_times(attempts):
    pauses = []
    while not attempts.are_over(4):
        pauses.append(attempts.failed(4, Reason.DIGEST_MISMATCH))
    assert len(pauses) == 3
    assert not attempts.are_over(5)
    attempts.announced(4)
    assert not attempts.are_over(4)


def test_a_source_that_is_away_is_tried_for_ever(attempts):
    for _ in range(50):
        assert attempts.failed(4, Reason.SOURCE_UNREACHABLE) <= 1.0
    assert not attempts.are_over(4)
    assert attempts.failure_count == 50
    attempts.succeeded()
    assert attempts.failure_count == 0


async def test_a_node_waits_for_the_next_version_once_it_has_tried_enough(
    fake_hub, running, engine, puller, make_version
):
    puller.failures = [AstraflowError(Reason.CHUNK_INVALID, "it is not sound")] * 3
    fake_hub.publish(make_version(1))
    await fake_hub.until(lambda: len(fake_hub.reports) == 4)
    assert engine.version == 0
    assert not puller.failures
    asked = len(puller.tokens)
    fake_hub.publish(make_version(2))
    await engine.until(lambda: engine.version == 2)
    assert len(puller.tokens) == asked + 1
