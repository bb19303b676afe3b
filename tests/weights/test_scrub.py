"""A copy that was damaged in memory is found out, and readers go on from a whole version."""

import ctypes
import threading

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.weights.fetch.puller import PullFailed
from astraflow.weights.publish.background import Scrub


def damage(training):
    """Flip a bit of the publisher's memory."""
    training.publisher.history._flat[1000] ^= 4


def flip(payload):
    """Flip a bit of bytes, as a fault of the memory does."""
    where = ctypes.cast(ctypes.c_char_p(bytes(payload)), ctypes.c_void_p).value
    ctypes.c_ubyte.from_address(where + len(payload) // 2).value ^= 4


async def pull(puller, training):
    info = training.infos[max(training.infos)]
    return await puller.pull(info, training.infos, training.token)


def test_a_sound_copy_is_found_sound_whatever_came(training):
    assert training.publisher.scrub() is None
    for share in (0.02, 0, 1, 0.3):
        training.publish(share=share, is_noise=share == 1)
        assert training.publisher.scrub()
    assert not training.publisher.is_damaged


@pytest.mark.parametrize("is_found_before", [True, False])
async def test_readers_recover_from_a_damaged_copy(training, tools, serve, puller, is_found_before):
    await serve()
    training.publish()
    await pull(puller, training)
    damage(training)
    if not is_found_before:
        training.publish()
        with pytest.raises(PullFailed) as caught:
            await pull(puller, training)
        assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert training.publisher.scrub() is False

    info = training.publish()
    pulled = await pull(puller, training)

    assert [patch.base_version for patch in info.patches] == [None]
    assert training.is_live(tools.live(pulled.update))
    assert training.publisher.scrub()
    training.publish()
    assert training.is_live(
        tools.live((await pull(puller, training)).update, tools.live(pulled.update))
    )


def test_damage_is_told_once_there_is_time_to_look(training):
    told = threading.Event()
    training.publish()
    with Scrub(training.publisher, damaged=told.set, time_share=1) as scrub:
        scrub.wake()
        damage(training)
        scrub.wake()
        assert told.wait(200)
    assert training.publisher.is_damaged


def test_a_doubt_is_looked_into_at_once_and_once(training):
    told = threading.Semaphore(0)
    training.publish()
    with Scrub(training.publisher, damaged=told.release, time_share=1e-9) as scrub:
        damage(training)
        scrub.wake()
        assert told.acquire(timeout=100)
        training.publish()
        damage(training)
        scrub.wake()
        scrub.check_now(1)
        assert told.acquire(timeout=100)
        scrub.check_now(1)
        scrub.check_now(0)
    assert not told.acquire(timeout=0)


def test_a_patch_that_is_damaged_where_it_is_kept_is_found(training):
    training.publish()
    training.publish()
    assert training.publisher.scrub()
    (patch,) = (each for each in training.store.patches if each.info.base_version == 0)
    payload = next(chunk.payload for chunk in patch.chunks.values() if chunk.payload)
    flip(payload)
    assert training.publisher.scrub() is False
    assert [each.base_version for each in training.publish().patches] == [None]
    assert training.publisher.scrub()


def test_a_copy_that_is_damaged_again_and_again_is_given_up(training):
    for _ in range(2):
        training.publish()
        damage(training)
        assert training.publisher.scrub() is False
    training.publish()
    assert training.publisher.scrub()
    for _ in range(3):
        training.publish()
        damage(training)
        assert training.publisher.scrub() is False
        assert training.publisher.scrub() is False
    with pytest.raises(AstraflowError, match="3 times in a row") as caught:
        training.publish()
    assert caught.value.reason is Reason.DIGEST_MISMATCH


def test_what_waits_for_its_time_ends_with_its_owner(training):
    training.publish()
    looked = threading.Event()
    damage(training)
    with Scrub(training.publisher, damaged=looked.set, time_share=1e-9) as scrub:
        scrub.wake()
        assert looked.wait(200)
        scrub.wake()
