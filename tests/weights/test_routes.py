"""The way of the fewest registered bytes."""

from astraflow.codec.chunks import CODEC_VERSION
from astraflow.core.versions import CodecProfile, PatchInfo, VersionInfo
from astraflow.weights.patches.routes import payload_nbytes


def versions(patches):
    """Return what the run knows, from {version: {base: bytes}}."""
    return {
        version: VersionInfo(
            policy_id="solver",
            version=version,
            layout_digest=bytes(32),
            content_digest=bytes(16),
            patches=tuple(patch(base, version, nbytes) for base, nbytes in bases.items()),
        )
        for version, bases in patches.items()
    }


def patch(base, version, nbytes, **fields):
    fields = {"profile": CodecProfile.FAST, "codec_version": CODEC_VERSION, **fields}
    return PatchInfo(
        base_version=base,
        version=version,
        root_digest=bytes(32),
        chunk_count=1,
        payload_nbytes=nbytes,
        **fields,
    )


def test_a_chain_is_the_sum_of_its_patches():
    known = versions({0: {None: 100}, 1: {0: 5, None: 100}, 2: {1: 6, None: 100}})

    assert payload_nbytes(known, 0, 2) == 11
    assert payload_nbytes(known, 1, 2) == 6
    assert payload_nbytes(known, None, 2) == 100


def test_a_patch_over_several_versions_is_taken_where_it_is_smaller():
    known = versions({1: {0: 5}, 2: {1: 6, 0: 8}, 3: {2: 1}})

    assert payload_nbytes(known, 0, 3) == 9


def test_a_whole_version_and_a_patch_may_be_less_than_the_whole():
    known = versions({1: {None: 50}, 2: {1: 6, None: 100}})

    assert payload_nbytes(known, None, 2) == 56


def test_a_base_costs_nothing_even_when_the_whole_would_lead_to_it():
    known = versions({1: {None: 50, 0: 3}, 2: {1: 6}})

    assert payload_nbytes(known, 1, 2) == 6


def test_a_hole_in_the_chain_is_no_way():
    known = versions({1: {0: 5}, 3: {2: 5}})

    assert payload_nbytes(known, 0, 3) is None
    assert payload_nbytes(known, 3, 1) is None


def test_what_this_release_cannot_read_is_no_way():
    (known,) = versions({1: {0: 5}}).values()
    for fields in (
        {"codec_version": CODEC_VERSION + 1},
        {"shard_count": 2},
    ):
        object.__setattr__(known, "patches", (patch(0, 1, 5, **fields),))
        assert payload_nbytes({1: known}, 0, 1) is None
