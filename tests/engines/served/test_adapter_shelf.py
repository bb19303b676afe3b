"""How long a version of adapters stays in a server."""

import asyncio
from pathlib import Path

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.served.adapters import Adapter, AdapterVersions
from astraflow.engines.served.server import Life


class Shelved:
    """A shelf of three places, and what it let go of."""

    def __init__(self) -> None:
        self.life = Life()
        self.gone: list[int] = []
        self.shelf = AdapterVersions(3, lambda adapter: self.gone.append(adapter.version))

    def put(self, version: int) -> Adapter:
        made = Adapter(version=version, name=f"v{version}", folder=Path(), life=self.life)
        self.shelf.put(made)
        return made


async def test_a_version_goes_once_it_is_neither_live_nor_sampled_with():
    it = Shelved()
    it.put(0)
    with it.shelf.using(None, it.life) as adapter:
        it.put(1)
        assert (adapter.version, it.gone) == (0, [])
    assert it.gone == [0]
    it.put(2)
    assert it.gone == [0, 1]


async def test_pins_are_counted_and_serve_beside_the_live_version():
    it = Shelved()
    it.put(0)
    it.shelf.pin(0, it.life)
    it.put(1)
    it.shelf.pin(0, it.life)
    it.shelf.unpin(0)
    with it.shelf.using(0, it.life) as adapter:
        assert adapter.version == 0
    assert it.shelf.pinned_versions == {0}
    assert it.gone == []
    it.shelf.unpin(0)
    it.shelf.unpin(0)
    assert it.gone == [0]
    with pytest.raises(AstraflowError, match="version 0 is not served") as caught:
        it.shelf.pin(0, it.life)
    assert caught.value.reason is Reason.VERSION_NOT_SERVED


async def test_a_version_waits_for_a_place():
    it = Shelved()
    first = it.put(0)
    for version in (1, 2):
        it.shelf.pin(version - 1, it.life)
        it.put(version)
    waiting = asyncio.ensure_future(it.shelf.wait_free())
    await asyncio.sleep(0)
    assert not waiting.done()
    it.shelf.unpin(0)
    it.shelf.forget(first)
    await waiting
    assert [kept.version for kept in it.shelf.kept] == [1, 2]


async def test_what_another_life_of_the_server_had_is_not_served():
    it = Shelved()
    with pytest.raises(AstraflowError, match="no version"), it.shelf.using(None, it.life):
        pass
    adapter = it.put(0)
    with pytest.raises(AstraflowError), it.shelf.using(0, Life()):
        pass
    assert adapter.user_count == 0
