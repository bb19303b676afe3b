"""An existing trainer trains on a run, through the gateway."""

import asyncio

import numpy as np
import pytest
import torch

from .conftest import bits_of, weights_of
from .peers.sender import PeerSender
from .peers.trainer import PeerTrainer

DTYPES = {
    "input_ids": torch.int32,
    "loss_mask": torch.int32,
    "logprobs": torch.float32,
    "versions": torch.int32,
    "attention_mask": torch.bool,
    "rewards": torch.float32,
    "group_reward_mean": torch.float32,
    "group_reward_std": torch.float32,
    "group_id": torch.int64,
}


@pytest.fixture
def sender():
    sender = PeerSender()
    sender.hold(0, weights_of(0))
    yield sender
    sender.close()


def train(trainer, step_count):
    """What an existing trainer does; returns its batches."""
    assert trainer.ready(4) == {"ok": True}
    batches = []
    for version in range(step_count):
        batches.append(trainer.batch(version))
        trainer.sender.hold(version + 1, weights_of(version + 1))
        assert trainer.notify_version(version + 1)["ok"]
    return batches


@pytest.mark.parametrize("step_count", [3, pytest.param(20, marks=pytest.mark.slow)])
async def test_a_trainer_trains(serving, sender, step_count):
    async with serving(step_count=step_count) as (run, gateway):
        batches = await asyncio.to_thread(train, PeerTrainer(gateway.address, sender), step_count)
        await run.finish()
        assert [policy.step for policy in run.status().policies] == [step_count]
        engine = run.nodes["raas-1"].engine
        assert np.array_equal(bits_of(engine), weights_of(engine.version))
    assert sender.modes == ["full", *["delta"] * (step_count - 1)]
    for version, answer in enumerate(batches):
        check(answer["batch"], version)
    assert "buffer_stats" in batches[0]


def check(batch, version):
    """Columns, element types and padding are those of the description."""
    shape = batch["input_ids"].shape
    assert {name: batch[name].dtype for name in DTYPES} == DTYPES
    assert shape[0] == len(batch["prompt_id"]) == 4
    inside = batch["attention_mask"]
    for name in ("input_ids", "loss_mask", "logprobs", "versions"):
        assert batch[name].shape == shape
        assert not batch[name][~inside].any()
    sampled = batch["loss_mask"].bool()
    assert (batch["versions"][inside & ~sampled] == -1).all()
    assert ((batch["versions"][sampled] >= 0) & (batch["versions"][sampled] <= version)).all()
    assert (batch["logprobs"][inside & ~sampled] == 0).all()
    assert sampled.any(dim=1).all()
    assert len(batch["group_id"].unique()) == 2
