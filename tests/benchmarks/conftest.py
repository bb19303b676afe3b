from collections.abc import Iterator

import pytest

from link import Link, LinkUnavailableError, Profile


@pytest.fixture
def link() -> Iterator[Link]:
    try:
        with Link(Profile(name="test", mbit_per_s=100, rtt_ms=80, queue_ms=100)) as made:
            yield made
    except LinkUnavailableError as error:
        pytest.skip(str(error))
