import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.peers import ALONE, agreeing


def test_a_rank_without_others_agrees_with_itself():
    values = np.arange(3.0)
    assert ALONE.all_gather(values) is values
    assert (ALONE.all_reduce_max(3), ALONE.all_reduce_sum(0.5)) == (3, 0.5)
    assert ALONE.merged({"loss": 1.0}, weight=0.0) == {"loss": 1.0}


def test_what_fails_here_is_raised_here():
    with pytest.raises(AstraflowError, match="torn"), agreeing(ALONE):
        raise AstraflowError(Reason.INVALID_FIELD, "torn")
