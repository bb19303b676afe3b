import numpy as np

from astraflow.engines.embedded.sampler import stream_of, uniforms


def test_a_draw_depends_on_seed_and_position_alone():
    streams = np.array([stream_of(s) for s in (5, 6, 7)])
    together = uniforms(streams, np.array([3, 4, 5]))
    alone = [uniforms(streams[i : i + 1], np.array([3 + i]))[0] for i in range(3)]
    assert together.tolist() == alone


def test_draws_are_uniform_over_positions_and_over_neighbouring_seeds():
    over_positions = uniforms(np.full(50_000, stream_of(0)), np.arange(50_000))
    over_seeds = uniforms(np.array([stream_of(s) for s in range(20_000)]), np.zeros(20_000, int))
    for draws in (over_positions, over_seeds):
        shares = np.histogram(draws, bins=10, range=(0, 1))[0] / len(draws)
        np.testing.assert_allclose(shares, 0.1, atol=0.01)
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
        assert draws.min() >= 0
        assert draws.max() < 1


def test_negative_and_large_seeds_have_streams_of_their_own():
    assert len({int(stream_of(seed)) for seed in (-1, 0, 1, 2**63 - 1, 2**64 + 7)}) == 5
