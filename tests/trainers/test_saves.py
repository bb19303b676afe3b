"""What the run asks for is saved once, after a step or while a trainer waits."""

import json
from dataclasses import replace

import pytest

from astraflow.config.recipe import TrainerConfig
from astraflow.config.run_dir import RunDir
from astraflow.core.batches import AckBatch, BatchOutcome
from astraflow.trainers.checkpoints import Checkpoints, Saves, start_points
from astraflow.trainers.torch_engine import TorchEngine


class Client:
    """The acks that came of orders."""

    def __init__(self):
        self.acks = []

    def ack_later(self, ack, *, checkpoint):
        self.acks.append(replace(ack, checkpoint_id=checkpoint.result()))

    def flush(self):
        pass


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def checkpoints(tmp_path, model_dir):
    engine = TorchEngine(TrainerConfig(), model_dir=model_dir)
    engine.prepare()
    return Checkpoints(engine, run_dir=RunDir(tmp_path), policy_id="solver")


@pytest.fixture
def saves(client, checkpoints):
    return Saves(client, checkpoints, TrainerConfig(checkpoint_every=2))


def acked(step):
    return AckBatch(batch_id=f"b{step}", outcome=BatchOutcome.CONSUMED, step=step)


def test_an_order_that_comes_again_is_carried_out_once(saves, client):
    saves.last = acked(1)
    for step in (1, 3):
        saves.save("mine", step=step, version=step)
        assert saves.after_step(step, step) is None
    assert [(ack.batch_id, ack.checkpoint_id) for ack in client.acks] == [("b1", "mine")]
    assert saves.after_step(4, 4).result() == "step_000004"


def test_a_trainer_that_waits_names_what_it_has_already(saves, client, tmp_path):
    assert saves.after_step(2, 2).result() == "step_000002"
    saves.last = acked(2)
    saves.save("mine", step=2, version=2)
    assert [(ack.batch_id, ack.checkpoint_id) for ack in client.acks] == [("b2", "mine")]
    state = json.loads(
        (RunDir(tmp_path).checkpoint("solver", 2) / "trainer_state.json").read_text()
    )
    assert state == {"step": 2, "version": 2, "checkpoint_id": "mine"}


def test_an_order_before_the_first_batch_waits_for_it(saves, client):
    saves.save("mine", step=0, version=0)
    assert client.acks == []
    assert saves.after_step(1, 1).result() == "mine"


def test_what_a_resumed_trainer_leaves_before_its_first_batch_keeps_its_name(
    client, checkpoints, tmp_path, model_dir
):
    checkpoints.save(step=4, version=4, checkpoint_id="mine")
    start, run_dir = start_points(RunDir(tmp_path), "solver")[0], RunDir(tmp_path)
    engine = TorchEngine(TrainerConfig(), model_dir=model_dir)
    engine.prepare()
    engine.restore(start.directory)
    again = Checkpoints(engine, run_dir=run_dir, policy_id="solver", start=start)
    Saves(client, again, TrainerConfig()).finish(step=4, version=5)
    assert start_points(run_dir, "solver")[0] == start


def test_what_the_recipe_keeps_stays(client, checkpoints, tmp_path):
    keep = {"last": 2, "every": 4}
    saves = Saves(client, checkpoints, TrainerConfig(checkpoint_every=1, save={"keep": keep}))
    written = [saves.after_step(step, step) for step in range(8)]
    assert written[-1].result() == "step_000007"
    left = sorted(path.name for path in RunDir(tmp_path).checkpoints("solver").iterdir())
    assert left == [f"step_{step:06d}" for step in (0, 4, 6, 7)]
