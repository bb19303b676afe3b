"""SaveRun over real sockets: asked, answered, and found again by another hub."""

import asyncio
import json

from astraflow.core.errors import Reason
from astraflow.wire.control import decode_saved_run
from astraflow.wire.rollout import decode_batch_header
from astraflow_proto.control.v1 import control_service_pb2 as pb


def save(scene, name="mine", timeout=100):
    request = pb.SaveRunRequest(checkpoint_id=name)
    return scene.control.SaveRun(request, metadata=scene.operator, timeout=timeout)


async def step(trainer, stream):
    """Train on the next batch, and save where that is asked for."""
    name = ""
    while True:
        message = await stream.read()
        name = message.save.checkpoint_id or name
        if message.HasField("header"):
            header = decode_batch_header(message.header)
        if message.HasField("part") and message.part.index == header.part_count - 1:
            trainer.step += 1
            await trainer.publish()
            await trainer.ack(header.batch_id, checkpoint_id=name)
            return name


async def test_a_run_is_saved_and_stays_so(start_hub, recipe_of):
    recipe = recipe_of(policies__solver__trainer__step_count=None)
    async with start_hub(recipe) as scene, asyncio.TaskGroup() as group:
        trainer, raas = scene.trainer(), scene.raas()
        await trainer.register()
        await trainer.publish()
        await raas.join()
        stream = trainer.batches()
        working = group.create_task(raas.work())
        await step(trainer, stream)
        asked = group.create_task(asyncio.wait_for(save(scene), 10))
        while not await step(trainer, stream):
            pass
        saved, path = decode_saved_run(await asked, checkpoint_id="mine")
        assert [part.step for part in saved.policies] == [trainer.step]
        assert saved.drawn_counts["train"] >= 2 * trainer.step
        written = json.loads(scene.run_dir.saved("mine").read_text())
        assert path == str(scene.run_dir.saved("mine"))
        assert written["policies"][0]["step"] == trainer.step
        working.cancel()
    scene.run_dir.saved("mine").unlink()
    async with start_hub(recipe) as scene:
        again, _ = decode_saved_run(await save(scene), checkpoint_id="mine")
        assert again == saved
        assert json.loads(scene.run_dir.saved("mine").read_text()) == written


async def test_a_trainer_that_is_missing_or_slow_is_named(start_hub, recipe_of, reason_of):
    async with start_hub(recipe_of()) as scene:
        assert await reason_of(save(scene)) is Reason.NOT_READY
        trainer = scene.trainer()
        await trainer.register()
        assert await reason_of(save(scene, timeout=0.5)) is Reason.NOT_READY
        asked = asyncio.ensure_future(reason_of(save(scene)))
        stream = trainer.batches()
        while not (await stream.read()).HasField("save"):
            pass
        await trainer.leave()
        assert await asked is Reason.NOT_READY
