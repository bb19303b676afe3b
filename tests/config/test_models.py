"""Where a policy's model and a data set may come from: one place each."""

import pytest
from pydantic import ValidationError

from astraflow.config.recipe import DataSet, ModelConfig

SHOWN = {"demonstrations": "demos.jsonl"}
TUTORED = {"tutor": "letter_sort:SortTutor"}


@pytest.mark.parametrize(
    "model",
    [
        {"path": "a"},
        {"name": "smollm2-135m"},
        {"hub": "org/name", "revision": "v1"},
        {"hub": "gpt2"},
        {"warm_up": TUTORED},
        {"tiny": {}, "warm_up": SHOWN},
        {"path": "a.gguf", "warm_up": SHOWN},
        {"name": "a", "warm_up": SHOWN, "lora": {}},
    ],
)
def test_a_model_has_one_origin(model):
    ModelConfig.model_validate(model)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "exactly one of 'path', 'name', 'hub', 'tiny' and 'warm_up.tutor'"),
        ({"path": "a", "name": "b"}, "exactly one of"),
        ({"path": "a", "warm_up": TUTORED}, "exactly one of"),
        ({"warm_up": SHOWN}, "exactly one of"),
        ({"tiny": {}}, "'tiny' has random weights"),
        ({"tiny": {"hidden_size": 100}, "warm_up": SHOWN}, "multiple of 32"),
        ({"path": "a", "revision": "v1"}, "'revision' is one of 'hub'"),
        ({"hub": "https://x/y"}, "pattern"),
        ({"path": "a", "warm_up": {}}, "exactly one of 'tutor' and 'demonstrations'"),
        ({"path": "a", "warm_up": {**SHOWN, "options": {"a": 1}}}, "those of a tutor"),
    ],
)
def test_a_model_without_one_is_refused(model, said):
    with pytest.raises(ValidationError, match=said):
        ModelConfig.model_validate(model)


def test_data_has_one_place():
    assert DataSet.model_validate({"hub": "openai/gsm8k", "config": "main"}).split == "train"
    # As a resolved recipe has it.
    DataSet.model_validate(DataSet.model_validate({"path": "a"}).model_dump(mode="json"))
    with pytest.raises(ValidationError, match="exactly one of 'path', 'hub' and 'seeds'"):
        DataSet.model_validate({})
    with pytest.raises(ValidationError, match="exactly one of 'path', 'hub' and 'seeds'"):
        DataSet.model_validate({"path": "a", "hub": "b"})
    with pytest.raises(ValidationError, match="only data of 'hub' has that"):
        DataSet.model_validate({"path": "a", "config": "main"})
