"""Any engine joins a real run by one call."""

import itertools
import json
import subprocess
import sys
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

from astraflow.client.loop_thread import LoopThread
from astraflow.client.rank import RankClient
from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.core.batches import StreamBatches
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import PublishRequested
from astraflow.core.members import MemberRole
from astraflow.testing import require_train_engine
from astraflow.trainers import run_engine
from astraflow.trainers.joining import TrainerPlace
from astraflow.trainers.main import train
from astraflow.trainers.origin import Publishing
from astraflow.weights.publish.publisher import WeightPublisher
from tests.trainers.engine_runs import EXAMPLES, example, training, vowel_recipe

ENGINES = {
    "numpy": lambda: example("numpy_bigram").BigramEngine(),
    "torch": lambda: example("plain_torch").PlainTorch(rate=1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_the_examples_keep_the_contract(name, tmp_path):
    require_train_engine(ENGINES[name], vocabulary_size=128, folder=tmp_path)


@pytest.mark.slow
def test_an_engine_without_torch_is_checked_without_torch():
    code = """
import sys
sys.argv += ["conformance", "engine", "numpy_bigram:BigramEngine", "--vocabulary-size", "64"]
from astraflow.cli.main import main
try:
    main()
except SystemExit as left:
    print("left with", left.code or 0, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=True
    )
    assert "passed  engine.restored" in done.stdout
    assert "left with 0 False" in done.stdout, done.stdout + done.stderr


def test_a_plain_loop_takes_sixty_lines():
    text = (EXAMPLES / "plain_torch.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
async def test_every_version_goes_live_and_checkpoints_are_left(name, tmp_path):
    engine, recipe = ENGINES[name](), vowel_recipe(tmp_path, export_dtype="f32")
    async with training(partial(run_engine, engine), recipe, tmp_path) as (run, node):
        pass
    assert run.status().policies[0].version == 3
    live = {key: bits.view(np.float32) for key, bits in node.engine.tensors.items()}
    for key, values in engine.named_parameters():
        assert np.array_equal(live[key], values.detach() if name == "torch" else values)
    steps = read_json_lines(RunDir(tmp_path / "run").metrics)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(np.isfinite(line["train/loss"]) for line in steps)
    saved = RunDir(tmp_path / "run").checkpoints("solver")
    assert sorted(path.name for path in saved.iterdir()) == ["step_000000", "step_000003"]
    assert json.loads((saved / "step_000003" / "trainer_state.json").read_text())["version"] == 3


class Counts(example("numpy_bigram").BigramEngine):
    """Counts the tokens that it is given."""

    def prepare(self):
        super().prepare()
        self.counts = []

    def train_step(self, batch):
        self.counts.append(sum(part.token_count for part in batch.parts))
        return super().train_step(batch)


class FirstOfTwo(Publishing):
    """Of a trainer whose second rank takes its share of each batch, and does nothing."""

    def __init__(self, policy_id, layout, *, hub, loop, stack):
        super().__init__(WeightPublisher(policy_id, layout), rank_count=2)
        self._second = partial(RankClient, hub=hub, loop=loop)
        self._stack = stack

    def entered(self, client):
        super().entered(client)
        share = StreamBatches(rank=1, world_size=2)
        client.on_session(
            lambda session: self._stack.enter_context(
                self._second(session_token=session.token, share=share)
            )
        )


def train_first_of_two(engine, *, hub, token, policy, settings, run_dir):
    place = TrainerPlace(hub=hub, token=token, run_dir=RunDir(run_dir))
    with LoopThread() as loop, ExitStack() as stack:
        publishing = partial(FirstOfTwo, hub=hub, loop=loop, stack=stack)
        train(engine, policy, settings, place, loop=loop, publishing=publishing)


@pytest.mark.slow
async def test_tokens_of_a_step_are_those_of_all_ranks(tmp_path):
    engine = Counts()
    recipe = vowel_recipe(tmp_path, export_dtype="f32")
    async with training(partial(train_first_of_two, engine), recipe, tmp_path):
        pass
    lines = read_json_lines(RunDir(tmp_path / "run").metrics)
    assert len(lines) == len(engine.counts) == 3
    for line, share in zip(lines, engine.counts, strict=True):
        # Rows are dealt out evenly, and no row is half of a batch.
        assert 1.5 * share < line["batch/tokens"] < 3 * share
        assert line["perf/trainer_tokens_per_s"] * line["time/step_s"] == pytest.approx(
            line["batch/tokens"], rel=1e-3
        )


class Stumbles(example("numpy_bigram").BigramEngine):
    """Fails on the second batch that it sees."""

    seen = 0

    def train_step(self, batch):
        self.seen += 1
        if self.seen == 2:
            raise AstraflowError(Reason.INTERNAL, "the gradient is not finite")
        return super().train_step(batch)


@pytest.mark.slow
async def test_a_run_goes_on_without_a_batch_that_failed(tmp_path):
    engine = Stumbles()
    recipe = vowel_recipe(tmp_path, export_dtype="f32", max_failed_steps=1)
    async with training(partial(run_engine, engine), recipe, tmp_path) as (run, _):
        pass
    assert (engine.seen, engine.step_count) == (4, 3)
    assert run.status().policies[0].version == 3
    steps = read_json_lines(RunDir(tmp_path / "run").metrics)
    assert [line["step"] for line in steps] == [1, 2, 3]
    (books,) = run.accounts()
    assert books.is_balanced


class Dies(example("numpy_bigram").BigramEngine):
    """Does not outlive its third batch."""

    def train_step(self, batch):
        if self.step_count == 2:
            raise RuntimeError("the power is gone")
        return super().train_step(batch)


@pytest.mark.slow
async def test_who_comes_back_goes_on_from_its_checkpoint(tmp_path):
    recipe = vowel_recipe(tmp_path, export_dtype="f32", checkpoint_every=1)
    first, second = Dies(), ENGINES["numpy"]()

    def twice(**arguments):
        with pytest.raises(RuntimeError, match="power"):
            run_engine(first, **arguments)
        run_engine(second, **arguments, resume=True)

    async with training(twice, recipe, tmp_path) as (run, _):
        pass
    steps = read_json_lines(RunDir(tmp_path / "run").metrics)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert second.step_count == 3
    # Version 3 is that of step 2 again.
    assert run.status().policies[0].version == 4


@pytest.mark.slow
async def test_who_waits_for_data_publishes_and_saves_when_asked(tmp_path):
    recipe = vowel_recipe(tmp_path, export_dtype="f32", sync={"style": "asked", "every": 1000})
    # Each of 3 steps has 8 samples. When the 16th begins, 12 are done: enough for one step.
    answers = itertools.count(1)

    def answer(text):
        if next(answers) == 16:
            node.engine.open.clear()
        return text

    train, of_node = partial(run_engine, ENGINES["numpy"]()), {"answer": answer, "capacity": 4}
    async with training(train, recipe, tmp_path, **of_node) as (run, node):
        async for status in (control := await run.control()).watch_run(min_interval_s=0.01):
            if status.policies[0].step and not node.engine.open.is_set():
                break
        members = run.status().members
        await control.save_run("mine", timeout_s=200)
        (raas,) = (each for each in members if each.role is MemberRole.RAAS)
        run.hub.apply(PublishRequested(member_id=raas.member_id, policy_id="solver"))
        async for status in control.watch_run(min_interval_s=0.01):
            if status.policies[0].version:
                break
        assert status.policies[0].step < 3
        node.engine.open.set()
    names = [path.name for path in RunDir(tmp_path / "run").checkpoints("solver").iterdir()]
    assert "step_000001" in names or "step_000002" in names
