"""An existing trainer trains on a run, through the gateway."""

import asyncio
from base64 import b64decode
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch

from astraflow.core.errors import AstraflowError, Reason

from .conftest import bits_of, weights_of
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


def train(trainer, step_count):
    """What an existing trainer does; returns its batches."""
    assert trainer.ready(4) == {"ok": True}
    batches = []
    for version in range(step_count):
        batches.append(trainer.batch(version))
        trainer.sender.hold(version + 1, weights_of(version + 1))
        assert trainer.notify_version(version + 1)["ok"]
    return batches


@pytest.mark.parametrize("step_count", [3, pytest.param(20, marks=pytest.mark.long)])
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


def drawn(trainer):
    """What a trainer sees whose readers vanish: the same batch, until it goes on."""
    trainer.ready(4)
    first = [trainer.batch(0) for _ in range(3)]
    trainer.sender.hold(1, weights_of(1))
    trainer.notify_version(1)
    trainer.notify_version(1)
    return [*first, trainer.batch(1)]


async def test_a_batch_whose_reader_vanished_comes_again(serving, sender):
    async with serving() as (run, gateway):
        first, again, still, later = await asyncio.to_thread(
            drawn, PeerTrainer(gateway.address, sender)
        )
        [account] = run.accounts()
    assert torch.equal(first["batch"]["input_ids"], again["batch"]["input_ids"])
    assert torch.equal(first["batch"]["group_id"], still["batch"]["group_id"])
    assert not set(first["batch"]["group_id"].tolist()) & set(later["batch"]["group_id"].tolist())
    assert account.trained_count == 4


async def test_a_label_that_is_not_the_version_of_the_bytes_is_refused(serving, sender):
    async with serving() as (run, gateway), httpx.AsyncClient(timeout=100) as client:
        trainer = PeerTrainer(gateway.address, sender)
        await asyncio.to_thread(trainer.ready, 4)
        url = f"http://{gateway.address}/notify_version"
        answer = await client.post(url, json={"version": 1})
        assert answer.status_code == 409
        assert "holds version 0, not 1" in answer.json()["error"]
        sender.hold(1, weights_of(1))
        sender.claims = 7
        answer = await client.post(url, json={"version": 1})
        assert "holds version 7, not 1" in answer.json()["error"]
        sender.claims, sender.torn = None, True
        answer = await client.post(url, json={"version": 1})
        assert "100 of 200 bytes" in answer.json()["error"]
        assert [policy.version for policy in run.status().policies] == [0]
        sender.torn = False
        assert (await client.post(url, json={"version": 3})).json()["reason"] == "VERSION_NOT_NEXT"
        assert (await client.post(url, json={"version": 1})).status_code == 200
        assert [policy.version for policy in run.status().policies] == [1]


@pytest.mark.slow
async def test_a_batch_that_does_not_come_is_an_error(serving, sender):
    async with (
        serving(node=False, recipe={"http.batch_timeout_s": 0.2}) as (_, gateway),
        httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=100) as client,
    ):
        await asyncio.to_thread(PeerTrainer(gateway.address, sender).ready, 4)
        answer = await client.get("/batch?version=0")
        assert answer.status_code == 504
        assert "no batch came in 0.2 s" in answer.json()["error"]
        status = (await client.get("/status")).json()
        assert status["agents"]["default"]["trainer_ready"]
        assert status["raas_pool"]["size"] == 0


async def test_a_trainer_that_waits_is_not_silent(serving, sender):
    times = {"http.batch_timeout_s": 3, "http.silence_s": 2}
    async with (
        serving(node=False, recipe=times) as (_, gateway),
        httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=100) as client,
    ):
        await asyncio.to_thread(PeerTrainer(gateway.address, sender).ready, 4)
        assert (await client.get("/batch?version=0")).status_code == 504


@pytest.mark.parametrize("call", ["PublishVersion", "AckBatch"])
async def test_a_version_that_the_run_did_not_take_is_notified_of_again(serving, sender, call):
    async with serving() as (run, gateway), httpx.AsyncClient(timeout=100) as client:
        line = await run.open_line()
        gateway.settings = replace(gateway.settings, hub=line.address)
        trainer = PeerTrainer(gateway.address, sender)
        await asyncio.to_thread(trainer.ready, 4)
        await asyncio.to_thread(trainer.batch, 0)
        sender.hold(1, weights_of(1))
        line.refuse(call, AstraflowError(Reason.OVERLOADED, "not now"))
        url = f"http://{gateway.address}/notify_version"
        answer = await client.post(url, json={"version": 1})
        assert (answer.status_code, answer.json()["error"]) == (429, "not now")
        assert (await client.post(url, json={"version": 1})).status_code == 200
        [policy] = run.status().policies
        assert (policy.version, policy.step) == (1, 1)
    assert sender.modes == ["full"]


async def test_a_batch_that_is_lost_is_let_go_of(serving, sender):
    async with serving() as (run, gateway):
        line = await run.open_line()
        gateway.settings = replace(gateway.settings, hub=line.address)
        trainer = PeerTrainer(gateway.address, sender)
        await asyncio.to_thread(trainer.ready, 4)
        await asyncio.to_thread(trainer.batch, 0)
        line.refuse("AckBatch", AstraflowError(Reason.LEASE_LOST, "its rows are elsewhere now"))
        sender.hold(1, weights_of(1))
        await asyncio.to_thread(trainer.notify_version, 1)
        assert gateway.trainer(None).batches.in_hand is None


@pytest.mark.slow
async def test_what_a_silent_trainer_held_returns(serving, sender):
    async with serving(recipe={"http.silence_s": 2}) as (run, gateway):
        trainer = PeerTrainer(gateway.address, sender)
        await asyncio.to_thread(trainer.ready, 4)
        await asyncio.to_thread(trainer.batch, 0)
        await asyncio.wait(gateway._lives.values(), timeout=100)
        assert [account.leased_count for account in run.accounts()] == [0]


@pytest.mark.slow
async def test_a_trainer_comes_back_with_older_weights(serving, sender):
    def come_back():
        trainer = PeerTrainer(gateway.address, sender)
        train(trainer, 2)
        sender.hold(1, weights_of(1))
        trainer.ready(4, recovered_version=1)
        return trainer.batch(1)

    async with serving(step_count=5) as (run, gateway):
        answer = await asyncio.to_thread(come_back)
        assert [policy.version for policy in run.status().policies] == [3]
    assert (answer["batch"]["versions"] <= 1).all()


@pytest.mark.slow
async def test_a_batch_in_json_has_the_same_columns(serving, sender):
    async with (
        serving() as (_, gateway),
        httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=100) as client,
    ):
        trainer = PeerTrainer(gateway.address, sender)
        await asyncio.to_thread(trainer.ready, 4)
        published = (await asyncio.to_thread(trainer.batch, 0))["batch"]
        accept = {"accept": "application/json"}
        as_json = (await client.get("/batch?version=0", headers=accept)).json()["batch"]
    tensor = as_json["logprobs"]
    found = np.frombuffer(b64decode(tensor["data"]), np.float32).reshape(tensor["shape"])
    assert np.array_equal(found, published["logprobs"].numpy())
    assert as_json["prompt_id"] == published["prompt_id"]
