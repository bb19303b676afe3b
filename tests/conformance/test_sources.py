"""Both forms of a part come to the same rows, or the check of it says what differs."""

from dataclasses import replace

import pytest

from astraflow.conformance.checks import Broken
from astraflow.conformance.trainer import require_same_rows
from astraflow.core.packing import Share, laid_out
from astraflow.core.rollouts import VersionSpan
from astraflow.core.samples import AcceptedRollout, sample_of
from astraflow.wire.rollout import batch_part_pieces
from astraflow_proto.rollout.v1 import batch_pb2
from made_up import made_up_rollout, made_up_trajectory


def encoded(part):
    return batch_pb2.BatchPart.FromString(b"".join(batch_part_pieces(part)))


def test_a_column_that_differs_from_its_sources_is_told():
    spans = (VersionSpan(version=0, length=3),)
    rollout = made_up_rollout(made_up_trajectory("t", "solver", spans))
    entry = AcceptedRollout(rollout=rollout, prompt_id="p", member_id="m", placements={})
    rows = sample_of(entry, "solver").rows
    (part,) = Share("b", rows, max_tokens=0, group_indexes={"g": 0})
    plain, sourced = encoded(laid_out(part, ["solver"])), encoded(part)

    require_same_rows(plain, sourced, ["solver"])
    (source,) = part.sources
    other = encoded(replace(part, sources=(replace(source, advantage=2.0),)))
    with pytest.raises(Broken, match="advantages"):
        require_same_rows(other, plain, ["solver"])
    with pytest.raises(Broken, match="alike"):
        require_same_rows(plain, plain, ["solver"])
