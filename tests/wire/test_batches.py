import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.wire.fields import encode_tensor
from astraflow.wire.rollout import decode_batch_part
from astraflow_proto.rollout.v1 import batch_pb2


def test_a_part_whose_offsets_do_not_rise_is_refused():
    offsets = encode_tensor(np.array([0, 2, 2]))
    part = batch_pb2.BatchPart(
        batch_id="b1", row_offsets=offsets, trajectory_ids="ab", rollout_ids="ab"
    )

    with pytest.raises(AstraflowError, match=f"{Reason.INVALID_FIELD}: .*must rise"):
        decode_batch_part(part)
