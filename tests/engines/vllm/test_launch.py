"""A vLLM server that cannot start says why."""

import json
from typing import Any

import pytest

from astraflow.core.errors import Reason

pytestmark = pytest.mark.vllm


async def test_a_model_that_it_does_not_know_is_named(why_not: Any, model: Any):
    path = model.folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"model_type": "nosuch", "architectures": ["NoSuch"]}))
    error = await why_not(kind="vllm", device="cpu")
    assert error.reason is Reason.ENGINE_FAILED
    assert "model type `nosuch`" in error.message


async def test_memory_that_the_machine_does_not_have_is_named(why_not: Any):
    error = await why_not(kind="vllm", device="cpu", cache_gib=100_000)
    assert error.reason is Reason.ENGINE_FAILED
    assert "less than requested memory" in error.message
