"""Runs in one process, as authors of workflows and trainers test with them."""

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from grpc import StatusCode

from astraflow.core.batches import EndCause
from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import Outcome
from astraflow.core.status import RunState
from astraflow.core.versions import SourceKind
from astraflow.raas.node import NodeDeparture
from astraflow.testing import one_turn, small_recipe, start_run
from astraflow.workflows.protocol import Score
from astraflow.workflows.registry import workflow

workflow("testing_length")(one_turn(lambda text: Score(reward=float(len(text)))))


@workflow("testing_relay")
class Pair:
    def __init__(self, options, scorer):
        pass

    async def run(self, episode):
        for policy_id in episode.policy_ids:
            talk = episode.trajectory(policy_id)
            talk.observe(episode.prompt.fields["prompt"])
            await talk.sample()
        return 1.0


@pytest.fixture
def recipe(tmp_path):
    return small_recipe(tmp_path, workflow="testing_length")


async def test_a_run_goes_from_its_first_prompt_to_its_last_version(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        node = await run.add_node(answer=lambda text: text[-1])
        training = run.add_trainer()
        status = await run.finish()
    assert status.state is RunState.DONE
    assert training.result().end.cause is EndCause.STEP_LIMIT
    assert len(training.result().batches) == 3
    assert node.left.result() is NodeDeparture.STOPPED
    assert node.engine.tensors["w"].view("f4").tolist() == [3.0] * 100
    assert {record.rollout.reward for record in run.rollouts()} == {1.0}
    assert {record.rollout.outcome for record in run.rollouts()} == {Outcome.SCORED}
    assert all(account.is_balanced for account in run.accounts())


async def test_a_block_that_ends_with_its_run_waits_for_what_the_hub_leaves(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=lambda text: text[-1])
        run.add_trainer()
        await run.hub.wait_over()
    assert run.serving.result().state is RunState.DONE
    assert run.run_dir.status.exists()


async def test_every_policy_has_a_trainer_and_engines_of_its_own(tmp_path):
    recipe = small_recipe(
        tmp_path,
        workflow="testing_relay",
        policies=("asks", "answers"),
        changes={"policies.answers.trainer.step_count": 2},
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        node = await run.add_node()
        trained = [run.add_trainer("asks"), run.add_trainer("answers")]
        assert (await run.finish()).state is RunState.DONE
    assert [len(each.result().batches) for each in trained] == [3, 2]
    assert {name: engine.version for name, engine in node.engines.items()} == {
        "asks": 3,
        "answers": 2,
    }


async def test_there_may_be_more_trainers_than_the_event_loop_has_threads(tmp_path):
    policies = [f"p{number}" for number in range(8)]
    recipe = small_recipe(tmp_path, workflow="testing_relay", policies=policies)
    # As a machine with four cores does.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8))
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node()
        trained = [run.add_trainer(policy) for policy in policies]
        assert (await run.finish()).state is RunState.DONE
    assert [len(each.result().batches) for each in trained] == [3] * 8


async def test_a_cut_line_costs_no_sample(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        node = await run.add_node()
        node.engine.open.clear()
        run.add_trainer()
        await node.engine.until(lambda: node.engine.running)
        node.line.cut()
        await node.line.until(lambda: node.line.calls["JoinPool"] == 2)
        node.engine.open.set()
        status = await run.finish()
    [account] = run.accounts()
    assert status.state is RunState.DONE
    assert account.is_balanced


async def test_what_a_killed_node_held_is_done_by_another(tmp_path, recipe):
    clock = ManualClock()
    async with start_run(recipe, run_dir=tmp_path / "run", clock=clock) as run:
        dying = await run.add_node()
        dying.engine.open.clear()
        run.add_trainer()
        await dying.engine.until(lambda: dying.engine.running)
        await dying.kill()
        await run.add_node()
        dying.line.silence()
        run.advance(recipe.hub.session_ttl_s + 1)
        status = await run.finish()
    [account] = run.accounts()
    assert status.state is RunState.DONE
    assert account.reissued_count > 0


async def test_a_silent_member_is_given_up_while_its_streams_are_open(tmp_path, recipe):
    clock = ManualClock()
    async with start_run(recipe, run_dir=tmp_path / "run", clock=clock) as run:
        silent = await run.add_node()
        silent.engine.open.clear()
        run.add_trainer()
        await silent.engine.until(lambda: silent.engine.running)
        silent.line.silence()
        run.advance(recipe.hub.session_ttl_s + 1)
        assert [member.name for member in run.status().members] == ["trainer-solver"]
        silent.line.release("KeepAlive")
        silent.engine.open.set()
        assert (await run.finish()).state is RunState.DONE


async def test_calls_are_refused_as_often_as_asked(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        line = await run.open_line()
        control = await run.control()
        line.refuse("GetRun", AstraflowError(Reason.TOKEN_INVALID, "not you"))
        line.refuse("GetRun", StatusCode.UNAVAILABLE, times=2)
        through = type(control)(line.address, token=run.operator_token)
        async with through:
            with pytest.raises(AstraflowError, match="not you"):
                await through.get_run()
            assert (await through.get_run()).state is (await control.get_run()).state
        assert line.calls["GetRun"] == 4


async def test_errors_pass_a_line_with_their_reason(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        line = await run.open_line()
        control = await run.control()
        async with type(control)(line.address, token="guess") as stranger:
            with pytest.raises(AstraflowError) as raised:
                await stranger.get_run()
    assert raised.value.reason is Reason.TOKEN_INVALID


async def test_a_held_call_goes_on_when_it_is_released(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run, asyncio.TaskGroup() as group:
        line = await run.open_line()
        control = type(await run.control())(line.address, token=run.operator_token)
        async with control:
            line.hold("GetRun")
            asked = group.create_task(control.get_run())
            await line.until(lambda: line.calls["GetRun"])
            assert not asked.done()
            line.release("GetRun")
            assert (await asked).state is RunState.WAITING


async def test_a_run_that_does_not_end_says_what_it_waits_for(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        with pytest.raises(TimeoutError, match=r"not over after 0 s: .*trainer"):
            await run.finish(timeout_s=0)


async def test_time_of_a_machine_is_not_moved(tmp_path, recipe):
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        with pytest.raises(RuntimeError, match="ManualClock"):
            run.advance(1)


async def fail_within(run_dir, recipe):
    async with start_run(recipe, run_dir=run_dir) as run:
        node = await run.add_node()
        node.engine.open.clear()
        run.add_trainer()
        await node.engine.until(lambda: node.engine.running)
        raise ValueError("the test's own")


async def test_a_failing_test_takes_its_run_down(tmp_path, recipe):
    with pytest.raises(ExceptionGroup) as raised:
        await fail_within(tmp_path / "run", recipe)
    assert raised.group_contains(ValueError, match="the test's own")


async def fail_beside_a_member(run_dir, recipe):
    async with start_run(recipe, run_dir=run_dir) as run:

        def fail():
            while not run.serving.done():
                time.sleep(0.01)
            raise RuntimeError("the member's own")

        run.add_thread(fail)
        raise ValueError("the test's own")


async def test_why_a_test_failed_is_told_beside_what_its_members_make_of_that(tmp_path, recipe):
    with pytest.raises(ExceptionGroup) as raised:
        await fail_beside_a_member(tmp_path / "run", recipe)
    assert raised.group_contains(RuntimeError, match="the member's own")
    assert raised.group_contains(ValueError, match="the test's own")


async def test_a_recipe_that_cannot_be_served_is_an_error_at_once(tmp_path, recipe):
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(ExceptionGroup) as raised:
        async with start_run(recipe, run_dir=tmp_path / "run"):
            pass
    assert raised.group_contains(AstraflowError)


@pytest.mark.slow
def test_neither_torch_nor_transformers_is_loaded():
    code = "import sys, astraflow.testing; print(*{'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


WITHOUT_EXTRAS = """
import asyncio, sys
from pathlib import Path
for extra in "fastapi uvicorn starlette httpx jinja2 zmq fsspec opentelemetry".split():
    sys.modules[extra] = None  # as if it were not installed
from astraflow.testing import one_turn, small_recipe, start_run
async def main():
    folder = Path(sys.argv[1])
    rows = [{"prompt": f"row {number}", "answer": "7"} for number in range(64)]
    recipe = small_recipe(folder, scorer="exact", prompts=rows)
    async with start_run(recipe, run_dir=folder / "run") as run:
        await run.add_node()
        run.add_trainer()
        print((await run.finish()).state)
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_run_needs_no_extra(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "done"


async def test_a_node_that_reaches_the_object_store_alone_follows_a_run(tmp_path):
    pytest.importorskip("fsspec")
    store = tmp_path / "bucket"
    recipe = small_recipe(tmp_path, workflow="testing_length")
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        node = await run.add_node(kinds=frozenset({SourceKind.OBJECT_STORE}))
        training = run.add_trainer(store=f"file://{store}")
        status = await run.finish()
        assert len((await training).batches) == 3
    assert status.state is RunState.DONE
    assert node.engine.version > 0
    written = [int(each.parent.name) for each in (store / "solver").glob("*/manifest")]
    assert sorted(written) == [0, 1, 2, 3]
