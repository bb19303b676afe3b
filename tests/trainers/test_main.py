"""A trainer in a real run: hub, node and engine in this process, everything on sockets."""

import asyncio
import json
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import pytest
from letter_sort import prompt_rows

from astraflow.client.loop_thread import LoopThread
from astraflow.config.recipe import ModelConfig, Recipe, WarmUp
from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.core.batches import BatchPart
from astraflow.core.rollouts import Column, ColumnAxis
from astraflow.core.status import RunState
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype, TensorUpdate, WeightUpdate
from astraflow.dataflow.prompts import open_data_sets
from astraflow.dataflow.server import serve_hub
from astraflow.engines.embedded import EmbeddedEngine, load_tokenizer
from astraflow.raas.main import ask_every
from astraflow.raas.node import NodeSettings, RaasNode
from astraflow.raas.policies import ServedModel, seeded_sampling
from astraflow.rpc.access import HubTokens
from astraflow.trainers.causal_model import load_causal_model
from astraflow.trainers.joining import TrainerPlace
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.lora import trained_parameters
from astraflow.trainers.main import main_run
from astraflow.trainers.main import train as train_engine
from astraflow.trainers.mismatch import export_bits
from astraflow.trainers.origin import published_layout
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.torch_engine import TorchEngine
from astraflow.trainers.warm_up import ensure_model
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.workflows.building import build_workflows, workflow_specs
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.runner import run_episode
from made_up import made_up_task

pytestmark = pytest.mark.slow

WARM_UP = WarmUp(tutor="letter_sort:SortTutor", step_count=120, batch_size=32, learning_rate=5e-3)


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory):
    return ensure_model(
        ModelConfig(warm_up=WARM_UP), seed=0, cache_dir=tmp_path_factory.mktemp("cache")
    )


@pytest.fixture
def make_recipe(tmp_path, warm_model):
    data = tmp_path / "train.jsonl"
    rows = prompt_rows(256, held_out=False, seed=0)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**trainer):
        return Recipe.model_validate(
            {
                "name": "tiny",
                "policies": {
                    "solver": {
                        "model": {"path": str(warm_model)},
                        "sampling": {"max_new_tokens": 8},
                        "trainer": {
                            "groups_per_batch": 4,
                            "optimizer": {"learning_rate": 1e-3},
                            **trainer,
                        },
                    }
                },
                "data": {"train": {"path": str(data), "id_field": "id"}},
                "workflows": {"sort": {"name": "single_turn", "scorer": "letter_sort:LetterSort"}},
                "rollouts": {"data_set": "train", "workflow": "sort", "group_size": 8},
                "hub": {"session_ttl_s": 30},
            }
        )

    return make


@contextmanager
def run_around(recipe, folder, warm_model):
    """Serve a hub and one node with an embedded engine, from one loop thread."""
    ready = Future()

    async def serve():
        return await serve_hub(
            recipe,
            run_dir=folder / "run",
            tokens=HubTokens(join="join", operator="operator"),
            on_ready=lambda _, address: ready.set_result(address),
        )

    # Here, because transformers cannot build two models in two threads at a time.
    engine = EmbeddedEngine.from_directory(
        warm_model, settings=recipe.raas.engine, policy_id="solver"
    )

    async def sample(address):
        codes = tuple(spec.code for spec in workflow_specs(recipe))
        codes += tuple(spec.scorer for spec in workflow_specs(recipe))
        node = RaasNode(
            NodeSettings(
                hub=address,
                token="join",
                name="node",
                capacity=64,
                codes=codes,
                ask_every=ask_every(recipe),
            ),
            models={"solver": ServedModel(engine=engine, tokenizer=load_tokenizer(warm_model))},
            puller=WeightPuller,
        )
        try:
            return await node.run()
        finally:
            await engine.close()

    with LoopThread() as loop:
        serving = loop.spawn(serve())
        address = ready.result(timeout=100)
        sampling = loop.spawn(sample(address))
        yield loop, address
        sampling.result(timeout=200)
        assert serving.result(timeout=200).state is RunState.DONE


def train(recipe, folder, warm_model):
    """Run to the end; return the metrics of every step."""
    run_dir = RunDir(folder / "run")
    with run_around(recipe, folder, warm_model) as (loop, address):
        settings = recipe.policies["solver"].trainer
        place = TrainerPlace(hub=address, token="join", run_dir=run_dir)
        engine = TorchEngine(settings, model_dir=warm_model)
        train_engine(engine, "solver", settings, place, loop=loop)
    return read_json_lines(run_dir.metrics)


def test_run_leaves_metrics_versions_and_checkpoints(tmp_path, make_recipe, warm_model):
    recipe = make_recipe(step_count=5, checkpoint_every=2, max_staleness=2)
    steps = train(recipe, tmp_path, warm_model)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        assert step.keys() >= {
            "train/loss",
            "train/entropy",
            "train/grad_norm",
            "train/lr",
            "train/clip_frac",
            "mismatch/logp_abs_mean",
            "mismatch/logp_abs_max",
            "mismatch/kl",
            "weights/bytes",
            "weights/density",
            "time/publish_s",
        }
        assert 0 < step["weights/density"] <= 1.1
        assert step["weights/version"] == step["step"]
    saved = tmp_path / "run" / "checkpoints" / "solver"
    names = [f"step_{step:06d}" for step in (0, 2, 4, 5)]
    assert sorted(path.name for path in saved.iterdir()) == names
    load_causal_model(saved / names[-1], device="cpu")
    live = read_json_lines(tmp_path / "run" / "versions.jsonl")
    assert live[-1]["version"] == 5


@pytest.mark.parametrize(
    ("dtype", "copy_on_device"), [("f32", False), ("bf16", False), ("bf16", True)]
)
def test_sampler_and_trainer_agree_at_equal_weights(
    tmp_path, make_recipe, warm_model, dtype, copy_on_device
):
    steps = train(
        make_recipe(
            step_count=2, max_staleness=0, export_dtype=dtype, copy_on_device=copy_on_device
        ),
        tmp_path,
        warm_model,
    )
    assert steps[0]["mismatch/same_weights_abs_max"] <= 1e-5
    assert steps[0]["mismatch/same_weights_version"] == 0
    # What bf16 costs shows against the f32 weights that are trained.
    assert (steps[0]["mismatch/logp_abs_max"] <= 1e-5) is (dtype == "f32")


async def sample_group(recipe, engine, tokenizer, workflow, prompt):
    """Return the trajectories and rewards of one group, with the seeds of a real run."""
    task = made_up_task(
        prompt=prompt,
        sample_indexes=tuple(range(recipe.rollouts.group_size)),
        sampling={"solver": SamplingParams(max_new_tokens=8, seed=recipe.seed)},
        timeout=timedelta(seconds=60),
    )

    def episode(index):
        port = PolicyPort(
            policy_id="solver",
            engine=engine,
            tokenizer=tokenizer,
            sampling=seeded_sampling(task, index, "solver"),
        )
        return Episode(task=task, sample_index=index, policies={"solver": port})

    rollouts = await asyncio.gather(
        *(run_episode(workflow, episode(index)) for index in task.sample_indexes)
    )
    return [rollout.trajectories[0] for rollout in rollouts], [r.reward for r in rollouts]


def to_rows(groups):
    """Return the rows of a batch, from trajectories and rewards by group."""
    trajectories = [trajectory for group, _ in groups for trajectory in group]
    rewards = np.array([rewards for _, rewards in groups])
    advantages = (rewards - rewards.mean(1, keepdims=True)).astype(np.float32).ravel()
    masks = [trajectory.sampled_mask for trajectory in trajectories]
    columns = {
        "tokens": np.concatenate([trajectory.tokens for trajectory in trajectories]),
        "loss_mask": np.concatenate(masks),
        "logprobs": np.concatenate([trajectory.logprobs for trajectory in trajectories]),
        "advantages": np.concatenate(
            [
                np.where(mask, advantage, 0)
                for mask, advantage in zip(masks, advantages, strict=True)
            ]
        ).astype(np.float32),
    }
    ids = tuple(map(str, range(len(trajectories))))
    part = BatchPart(
        batch_id="b",
        index=0,
        row_offsets=np.concatenate([[0], np.cumsum([len(mask) for mask in masks])]),
        trajectory_ids=ids,
        rollout_ids=ids,
        columns={
            name: Column(axis=ColumnAxis.TOKEN, values=values) for name, values in columns.items()
        },
    )
    return TrainRows.from_parts([part])


async def synchronous(recipe, warm_model):
    """Train in one loop over the same engine; return losses and the tokens of each version."""
    settings = recipe.policies["solver"].trainer
    engine = EmbeddedEngine.from_directory(
        warm_model, settings=recipe.raas.engine, policy_id="solver"
    )
    model = load_causal_model(warm_model, device="cpu")
    learner, dtype = PolicyLearner(model, settings), Dtype(settings.export_dtype)
    layout = published_layout(trained_parameters(model.module).items(), dtype)
    (workflow,) = build_workflows(workflow_specs(recipe)).values()
    source = open_data_sets(recipe).source("train", epochs=None)
    losses, tokens, before = [], [], {}
    for step in range(settings.step_count):
        bits = export_bits(model.module, dtype)
        # With the weights of the version before, it may be sampled by that one.
        is_same = bool(before) and all(np.array_equal(bits[name], before[name]) for name in bits)
        before = {name: each.copy() for name, each in bits.items()}
        await engine.swap(
            WeightUpdate(
                policy_id="solver",
                version=step,
                base_version=None,
                tensors=tuple(
                    TensorUpdate(spec=spec, indices=None, values=bits[spec.name].ravel())
                    for spec in layout.tensors
                ),
            )
        )
        tokenizer = load_tokenizer(warm_model)
        groups = [
            await sample_group(recipe, engine, tokenizer, workflow, prompt)
            for prompt in source.draw(settings.groups_per_batch)[0]
        ]
        rows = to_rows(groups)
        metrics = learner.step(rows, divisor=len(rows.loss))
        losses.append(metrics["train/loss"])
        tokens.append(tokens[-1] if is_same else set())
        tokens[-1].update(tuple(t.tokens.tolist()) for group, _ in groups for t in group)
    await engine.close()
    return losses, tokens, export_bits(model.module, Dtype.F32)


def test_lag_zero_is_the_synchronous_loop(tmp_path, make_recipe, warm_model):
    recipe = make_recipe(step_count=10, max_staleness=0)
    steps = train(recipe, tmp_path, warm_model)
    losses, tokens, weights = asyncio.run(synchronous(recipe, warm_model))
    np.testing.assert_allclose([step["train/loss"] for step in steps], losses, atol=1e-5, rtol=0)
    kept = read_json_lines(tmp_path / "run" / "rollouts" / "solver.jsonl")
    assert kept
    for rollout in kept:
        (trajectory,) = rollout["trajectories"]
        assert tuple(trajectory["tokens"]) in tokens[rollout["versions"]["solver"]]
    last = RunDir(tmp_path / "run").checkpoint("solver", 10)
    trained = export_bits(load_causal_model(last, device="cpu").module, Dtype.F32)
    for name, bits in weights.items():
        np.testing.assert_array_equal(trained[name], bits, err_msg=name)


def test_model_that_is_not_there_is_an_exit_code(tmp_path, make_recipe, capfd):
    place = TrainerPlace(hub="127.0.0.1:1", token="join", run_dir=RunDir(tmp_path))
    nowhere = tmp_path / "nowhere"
    code = main_run(make_recipe(), policy_id="solver", model_dir=nowhere, place=place)
    assert code == 78
    assert "nowhere has no config.json" in capfd.readouterr().err


def test_versions_come_every_so_many_steps_and_the_last_one_too(tmp_path, make_recipe, warm_model):
    recipe = make_recipe(step_count=5, max_staleness=0, sync={"every": 2})
    steps = train(recipe, tmp_path, warm_model)
    assert [line.get("weights/version") for line in steps] == [None, 1.0, None, 2.0, 3.0]
    assert all(line["lag/max"] == 0 for line in steps)


def test_versions_come_when_nodes_ask_for_them(tmp_path, make_recipe, warm_model):
    recipe = make_recipe(step_count=5, max_staleness=1, sync={"style": "asked", "every": 6})
    steps = train(recipe, tmp_path, warm_model)
    assert len(steps) == 5
    assert all(line["lag/max"] <= 1 for line in steps)
    versions = [line["weights/version"] for line in steps if "weights/version" in line]
    assert 1 <= len(versions) <= 5
    assert versions[-1] == max(versions)
