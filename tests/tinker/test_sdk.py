"""Tinker's SDK, as it is published, on a server of ours.

scripts/install_tinker.sh VENV
ASTRAFLOW_TINKER_PYTHON=VENV/bin/python pytest -m tinker
"""

import asyncio
import json
import os
import re
import signal
from asyncio.subprocess import PIPE
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from astraflow.tinker.checkpoints import CheckpointPath

from .conftest import NAME, made_data, process
from .plain import Plain

PYTHON = os.environ.get("ASTRAFLOW_TINKER_PYTHON", "")
SCRIPT = Path(__file__).with_name("sdk.py")
PAGE = Path(__file__).parents[2] / "docs" / "tinker.md"
SCALE = 32.0 / 4

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(not PYTHON, reason="ASTRAFLOW_TINKER_PYTHON is not set"),
    pytest.mark.timeout(600),
]


def as_lists(rows):
    return [{name: each.tolist() for name, each in row.items()} for row in rows]


async def sdk(address, name, told):
    """Run a part of sdk.py; return what it prints."""
    return json.loads(await python(str(SCRIPT), address, name, told=json.dumps(told)))


async def python(*arguments, told=""):
    """Run the interpreter that has the SDK; return what it prints."""
    started = await asyncio.create_subprocess_exec(
        *(PYTHON, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | {"no_proxy": "*", "TINKER_TELEMETRY": "0"},
    )
    out, err = await started.communicate(told.encode())
    assert started.returncode == 0, err.decode()[-3000:]
    return out.decode()


@pytest.fixture
async def server(settings):
    async with process(settings) as (_, address):
        yield address


async def test_the_program_of_the_page_trains_and_samples(server, settings):
    [shown] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    program = shown.replace("localhost:8000", server.removeprefix("http://"))
    program = program.replace("Qwen/Qwen3-8B", NAME).replace("rank=32", "rank=4")
    printed = await python("-c", f"{program}\nprint(training.get_info().model_id)\n")
    saved = settings.directory / printed.strip() / "snapshots"
    assert len([*saved.iterdir()]) == 2


async def test_losses_and_steps_are_those_of_plain_torch(server, settings, model_dir):
    rows = made_data(6)
    told = await sdk(server, "train", as_lists(rows))
    plain = Plain(
        model_dir, settings.directory / CheckpointPath.parse(told["before"]).relative, scale=SCALE
    )
    adam = plain.adam(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    bounds = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}
    for loss_fn, found in told["losses"].items():
        loss = sum(plain.loss(row, loss_fn, *bounds.get(loss_fn, ())) for row in rows)
        for row, one in zip(rows, found["logprobs"], strict=True):
            np.testing.assert_allclose(one, plain.logprobs(row).detach(), atol=1e-4)
        assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in plain.trained])
        assert found["norm"] == pytest.approx(float(norm), rel=1e-3)
        adam.step()
        adam.zero_grad()
    folder = settings.directory / CheckpointPath.parse(told["after"]).relative
    after = load_file(folder / "adapter_model.safetensors")
    for name, each in plain.adapters.items():
        torch.testing.assert_close(after[name], each.detach(), atol=1e-4, rtol=1e-3)


async def test_samples_are_of_the_weights_of_their_session_as_training_sees_them(server):
    told = await sdk(server, "sample", as_lists(made_data(4)))
    for step in told["steps"]:
        np.testing.assert_allclose(step["sampled"], step["trained"], atol=1e-5)
        np.testing.assert_allclose(step["sampled"], step["scored"], atol=1e-5)
        assert step["ids"] == 2
    np.testing.assert_array_equal(told["again"], told["steps"][0]["sampled"])
    assert told["base"] != told["again"]


async def test_a_batch_in_chunks_is_one_batch(server, settings, model_dir):
    rows = made_data(7)
    told = await sdk(server, "chunks", as_lists(rows))
    plain = Plain(model_dir)
    assert told["count"] == 2100
    expected = [plain.logprobs(row).detach() for row in rows]
    for one, logprobs in zip(told["logprobs"], expected, strict=True):
        np.testing.assert_allclose(one, logprobs, atol=1e-5)
    np.testing.assert_allclose(told["last"], expected[-1], atol=1e-5)
    loss = 300 * sum(float(plain.loss(row, "cross_entropy").detach()) for row in rows)
    assert told["loss"] == pytest.approx(loss, rel=1e-5)
    # All three parts are behind the step.
    one = await sdk(server, "train", as_lists(rows))
    assert told["norm"] == pytest.approx(300 * one["losses"]["cross_entropy"]["norm"], rel=1e-3)


async def test_a_loss_of_the_programs_own_has_its_gradient(server):
    told = await sdk(server, "custom", as_lists(made_data(4)))
    assert told["metrics"]["squares:sum"] == pytest.approx(told["squares"], rel=1e-5)
    assert told["norms"][0] == pytest.approx(told["norms"][1], rel=1e-4)


async def test_a_program_goes_on_after_its_server_was_killed(settings):
    rows = as_lists(made_data(4))
    async with process(settings) as (server, address):
        told = await sdk(address, "save", rows)
        server.send_signal(signal.SIGKILL)
        await server.wait()
    async with process(settings) as (_, address):
        found = await sdk(address, "resume", {**told, "rows": rows})
    assert found["norm"] == told["norm"]
    assert found["logprobs"] == told["logprobs"]
    assert found["sampled"]


async def test_errors_say_what_is_wrong_and_the_model_goes_on(server):
    told = await sdk(server, "fail", as_lists(made_data(2)))
    for name, why in {
        "image": "image is not served",
        "loss": "'dro' is not served",
        "inputs": "takes target_tokens, advantages, logprobs",
        "path": "no name of a checkpoint",
        "missing": "never saved, or expired",
        "rank": "--max-rank",
        "model": "this server has",
    }.items():
        assert why in told[name], (name, told[name])
    assert told["after"]
