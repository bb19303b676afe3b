"""Loading a model directory."""

import pytest
import torch

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.causal_model import load_causal_model, resolve_device


def test_directory_is_loaded_in_f32_with_what_is_never_sampled(model_dir):
    model = load_causal_model(model_dir, device="cpu")
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    assert model.never_sampled.tolist() == [0, 1]
    assert model.vocabulary_size == 14
    assert not model.module.training


def test_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(AstraflowError, match=str(tmp_path)) as caught:
        load_causal_model(tmp_path, device="cpu")
    assert caught.value.reason is Reason.INVALID_FIELD


def test_unknown_architecture_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(AstraflowError, match="no_such_model"):
        load_causal_model(tmp_path, device="cpu")


def test_auto_is_the_cpu_without_an_accelerator():
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device("auto").type == wanted
