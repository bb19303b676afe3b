"""The operator's client against the real hub, before any member has joined."""

import asyncio

import pytest

from astraflow.client.control import ControlClient
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.status import RunState, StopMode, WaitCause
from astraflow.dataflow.server import serve_hub
from astraflow.rpc.access import HubTokens
from astraflow.testing import small_recipe


@pytest.fixture
async def address(tmp_path):
    """Where a hub serves; it is taken down at the end."""
    suite = {"data_sets": [{"data_set": "train", "workflow": "main"}]}
    recipe = small_recipe(tmp_path, scorer="exact", changes={"evals.suite": suite})
    ready = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(
            serve_hub(
                recipe,
                run_dir=tmp_path / "run",
                tokens=HubTokens(join="join", operator="operator"),
                on_ready=lambda _, address: ready.set_result(address),
            )
        )
        yield await ready
        serving.cancel()


@pytest.fixture
async def control(address):
    async with ControlClient(address, token="operator") as control:
        yield control


async def test_a_run_is_paused_and_resumed(control):
    assert (await control.get_run()).state is RunState.WAITING
    await control.pause_run()
    assert (await control.get_run()).state is RunState.PAUSED
    await control.resume_run()
    assert (await control.get_run()).state is RunState.WAITING


async def test_a_watch_ends_with_the_run(control):
    states = []
    async for status in control.watch_run(min_interval_s=0.0):
        states.append(status.state)
        if len(states) == 1:
            await control.stop_run(StopMode.DRAIN, grace_s=1.0)
    assert states[0] is RunState.WAITING
    assert states[-1].is_final


async def test_the_books_of_a_fresh_run_are_empty_and_balanced(control):
    [account] = await control.ledger.accounts()
    assert (account.policy_id, account.issued_count) == ("solver", 0)
    assert account.is_balanced
    assert [record async for record in control.ledger.rollouts()] == []
    assert [letter async for letter in control.ledger.dead_letters()] == []


async def test_a_wait_is_explained(control):
    reasons = await control.ledger.explain_wait("solver")
    assert reasons[0].cause is WaitCause.NO_TRAINER


async def test_suites_come_from_the_recipe(control):
    [suite] = await control.evals.suites()
    assert (suite.suite, suite.data_sets[0].prompt_count) == ("suite", 64)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda control: control.drain_member("nobody"), Reason.MEMBER_UNKNOWN),
        (lambda control: control.ledger.explain_wait("nobody"), Reason.POLICY_UNKNOWN),
        (lambda control: control.evals.create("suit"), Reason.EVAL_UNKNOWN),
        (lambda control: control.evals.get("nothing"), Reason.EVAL_UNKNOWN),
        (lambda control: control.evals.cancel("nothing"), Reason.EVAL_UNKNOWN),
        (lambda control: anext(control.evals.watch("nothing")), Reason.EVAL_UNKNOWN),
    ],
)
async def test_what_does_not_exist_is_named(control, call, reason):
    with pytest.raises(AstraflowError) as raised:
        await call(control)
    assert raised.value.reason is reason


@pytest.mark.parametrize(
    ("token", "reason"), [("guess", Reason.TOKEN_INVALID), ("join", Reason.ROLE_NOT_ALLOWED)]
)
async def test_only_the_operator_may_look(address, token, reason):
    async with ControlClient(address, token=token) as control:
        with pytest.raises(AstraflowError) as raised:
            await control.get_run()
        with pytest.raises(AstraflowError):
            await anext(control.watch_run())
    assert raised.value.reason is reason


@pytest.mark.parametrize(
    ("host", "is_told"), [("192.0.2.77", True), ("127.0.0.1", False), ("[::1]", False)]
)
async def test_a_proxy_that_stands_before_a_hub_that_is_not_heard_is_told(
    host, is_told, monkeypatch
):
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:1")
    async with ControlClient(f"{host}:1", token="x", patience_s=0.01) as control:
        with pytest.raises(AstraflowError, match="check that it runs") as raised:
            await control.get_run()
    assert ("the proxy of http_proxy reaches it or no_proxy" in raised.value.message) is is_told
    assert "secret" not in raised.value.message
