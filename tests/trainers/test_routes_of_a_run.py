"""Routes go from a node's engine by a real hub and its journal to the trainer."""

import asyncio
import shutil

import numpy as np
import pytest
import torch
from letter_sort import prompt_rows

from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import EngineSettings, TrainerConfig
from astraflow.core.ids import PolicyId
from astraflow.core.members import Capability, Contract, RegisterTrainer
from astraflow.core.rollouts import ROUTED_EXPERTS, UNROUTED
from astraflow.core.tensors import Dtype
from astraflow.core.versions import WeightEndpoint
from astraflow.engines.embedded import EmbeddedEngine, load_tokenizer
from astraflow.engines.routers import mixtures_of
from astraflow.raas.policies import ServedModel
from astraflow.testing import small_recipe, start_run
from astraflow.testing.nodes import make_node
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.model_files import save_model
from astraflow.trainers.origin import published_layout
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.torch_engine import replayed
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer
from astraflow.workflows.tutors import BOS_ID, PAD_ID, write_tokenizer

pytestmark = pytest.mark.slow

GROUPS = 16
CHANGES = {
    "policies.solver.trainer.groups_per_batch": GROUPS,
    "policies.solver.trainer.router_replay": "required",
    "policies.solver.sampling.max_new_tokens": 16,
    "rollouts.group_size": 4,
}
# Rounding in bf16 moves the chance of an expert by less.
CLEAR = 0.05


@pytest.fixture(scope="module")
def model(make_mixture):
    return CausalModel(make_mixture(num_experts=16), never_sampled=(PAD_ID, BOS_ID))


@pytest.fixture(scope="module")
def batches(tmp_path_factory, model):
    """What a trainer got, and what it got again from a hub that went on from the journal."""
    folder = tmp_path_factory.mktemp("run")
    write_tokenizer(folder / "tokenizer", "abcdefghij>")
    save_model(model.module, folder / "model", companions_of=folder / "tokenizer")
    rows = [dict(row) for row in prompt_rows(GROUPS, held_out=False, seed=0)]
    recipe = small_recipe(folder, scorer="letter_sort:LetterSort", prompts=rows, changes=CHANGES)
    return asyncio.run(both_batches(recipe, folder, model))


async def both_batches(recipe, folder, model):
    async with start_run(recipe, run_dir=folder / "run") as run:
        node = asyncio.create_task(node_of(run, folder / "model").run())
        first = await asyncio.to_thread(first_batch, run, model)
        shutil.copytree(folder / "run", folder / "as_killed")
        node.cancel()
    async with start_run(recipe, run_dir=folder / "as_killed") as run:
        return first, await asyncio.to_thread(first_batch, run, model)


def node_of(run, directory):
    settings = EngineSettings(device="cpu", dtype="bf16")
    engine = EmbeddedEngine.from_directory(directory, settings, PolicyId("solver"))
    served = ServedModel(engine=engine, tokenizer=load_tokenizer(directory))
    return make_node(
        run.recipe,
        hub=run.address,
        token=run.join_token,
        name="node",
        capacity=64,
        models={"solver": served},
    )


def first_batch(run, model):
    """Be the trainer as far as the first batch, and leave with it."""
    tensors = dict(model.module.named_parameters())
    publisher = WeightPublisher("solver", published_layout(tensors.items(), Dtype.BF16))
    with WeightServer(publisher) as server:
        register = RegisterTrainer(
            policy_id="solver",
            name="trainer",
            contract=Contract(capabilities=frozenset({Capability.ROUTED_EXPERTS})),
            groups_per_batch=GROUPS,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint=server.endpoint),),
        )
        with TrainerClient(hub=run.address, token=run.join_token, register=register) as client:
            client.on_transfer_token(server.set_transfer_token)
            version = client.registration.next_version
            client.publish_version(publisher.publish(version, tensors))
            return next(iter(client.batches()))


def rows_of(batch):
    """Yield of each row its trajectory, its tokens and its routes."""
    for part in batch.parts:
        for row, name in enumerate(part.trajectory_ids):
            where = slice(part.row_offsets[row], part.row_offsets[row + 1])
            yield name, part.values("tokens")[where], part.values(ROUTED_EXPERTS)[where]


def chances_of(model, tokens, routes):
    """Return the chance of each expert, f32[tokens, layers, experts], on the way that was told."""
    found = []
    hooks = [
        mixture.module.gate.register_forward_hook(
            lambda *call: found.append(call[2][0].softmax(-1))
        )
        for mixture in mixtures_of(model.module)
    ]
    model.routes.expect(routes)
    with torch.no_grad():
        model.logits(torch.from_numpy(tokens.astype(np.int64))[None], torch.tensor([0]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


def test_every_token_says_which_experts_it_went_through(model, batches):
    clear = []
    for _, tokens, routes in rows_of(batches[0]):
        chances, best = chances_of(model, tokens, routes).sort(-1, descending=True)
        is_clear = (chances[:-1, :, 1] - chances[:-1, :, 2] > CLEAR).numpy()
        own, told = np.sort(best[:-1, :, :2].numpy()), np.sort(routes[:-1])
        assert np.array_equal(own[is_clear], told[is_clear])
        assert (routes[-1] == UNROUTED).all()
        clear.append(is_clear)
    # So that it compares many. The batch has every prompt, whichever groups finished first.
    assert np.concatenate(clear).mean() > 0.5


def test_replay_takes_the_jumps_out_of_the_mismatch(model, batches):
    learner, rows = PolicyLearner(model, TrainerConfig()), TrainRows.from_parts(batches[0].parts)
    gaps = {}
    for choice in ("required", "never"):
        chosen = replayed(rows, model, choice)
        seen = learner.likelihoods(chosen, np.ones(rows.row_count, np.bool_))
        gaps[choice] = np.abs(seen.logprobs - rows.loss.sampler_logprobs)
    assert gaps["never"].max() > 2 * gaps["required"].max()
    assert gaps["never"].mean() > gaps["required"].mean()


def test_the_journal_has_them(batches):
    before, after = ({name: routes for name, _, routes in rows_of(each)} for each in batches)
    assert set(before) == set(after)
    assert all(np.array_equal(before[name], after[name]) for name in before)
