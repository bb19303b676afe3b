"""What is known of a model without its server, and which updates it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.served.model import ModelDescription


def test_a_directory_tells_limits_and_shapes(model: Any):
    read = ModelDescription.read(model.folder, None)
    assert (read.vocab_size, read.max_context) == (14, 512)
    assert read.special.never_sampled == {0, 1}
    assert read.shapes == {name: bits.shape for name, bits in model.bits(0).items()}
    assert ModelDescription.read(model.folder, 64).max_context == 64


def test_more_context_than_the_model_has_is_refused(model: Any):
    with pytest.raises(AstraflowError, match="513"):
        ModelDescription.read(model.folder, 513)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path):
    with pytest.raises(AstraflowError) as caught:
        ModelDescription.read(tmp_path, None)
    assert caught.value.reason is Reason.INVALID_FIELD
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 3}))
    with pytest.raises(AstraflowError, match="max_position_embeddings"):
        ModelDescription.read(tmp_path, None)


def test_a_sound_update_passes_and_one_that_is_not_finite_does_not(model: Any):
    read, update = ModelDescription.read(model.folder, None), model.update(1, seed=1)
    read.check(update, None)
    last = update.tensors[-1]
    for odd in (0x7FC00000, 0xFF800000):
        values = np.where(np.arange(last.values.size) == 2, np.uint32(odd), last.values)
        spoilt = replace(update, tensors=(*update.tensors[:-1], replace(last, values=values)))
        with pytest.raises(AstraflowError, match=last.spec.name) as caught:
            read.check(spoilt, None)
        assert caught.value.reason is Reason.APPLY_FAILED
