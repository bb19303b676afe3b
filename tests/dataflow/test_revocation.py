"""A token of a role that is taken back opens nothing any more, and what it opened ends."""

import asyncio
from contextlib import suppress

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import TokenRevoked
from astraflow.dataflow.compaction import compact
from astraflow.rpc.access import token_id_of
from astraflow.rpc.auth import bearer
from astraflow.rpc.errors import translate_errors
from astraflow_proto.control.v1 import control_service_pb2 as pb
from astraflow_proto.control.v1.control_service_pb2_grpc import ControlServiceStub
from astraflow_proto.evals.v1 import eval_service_pb2 as eval_pb


async def revoke(scene, token_id, metadata=None):
    with translate_errors():
        return await ControlServiceStub(scene.channel).RevokeToken(
            pb.RevokeTokenRequest(token_id=token_id), metadata=metadata or scene.operator
        )


async def test_a_revoked_token_opens_nothing_and_its_sessions_end(start_hub, recipe_of, reason_of):
    async with start_hub(recipe_of()) as scene:
        token = scene.tokens.of_role("node")
        revoked, other = scene.raas("revoked"), scene.raas("other")
        await revoked.join(token=token)
        await other.join(token=scene.tokens.of_role("node"))
        answer = await revoke(scene, token_id_of(token))
        assert list(answer.member_ids) == [revoked.member_id]
        assert await reason_of(revoked.keep_alive()) is Reason.SESSION_ENDED
        with pytest.raises(AstraflowError, match=f"{token_id_of(token)} was revoked") as caught:
            await revoked.join(token=token)
        assert caught.value.reason is Reason.TOKEN_INVALID
        await other.keep_alive()
        again = await revoke(scene, token_id_of(token))
        assert list(again.member_ids) == []


async def test_sessions_end_though_the_operator_does_not_wait(
    start_hub, recipe_of, reason_of, journal_that_waits
):
    async with start_hub(recipe_of()) as scene:
        node, token = scene.raas(), scene.tokens.of_role("node")
        await node.join(token=token)
        with journal_that_waits(scene):
            revoking = asyncio.ensure_future(revoke(scene, token_id_of(token)))
            for number in range(6):
                # It has heard of the call, and of its end, by then.
                assert await reason_of(scene.raas().keep_alive()) is Reason.TOKEN_INVALID
                if number == 2:
                    pending = [type(each.event) for each in scene.hub.commits.pending]
                    revoking.cancel()
            assert TokenRevoked in pending
        while scene.hub.status().members:
            await scene.hub.commits.passed()
            await asyncio.sleep(0)
        assert await reason_of(node.keep_alive()) is Reason.SESSION_ENDED


async def test_a_trainer_whose_token_is_revoked_gives_its_batches_back(
    start_hub, recipe_of, reason_of
):
    async with start_hub(recipe_of()) as scene:
        token, trainer = scene.tokens.of_role("trainer:solver"), scene.trainer()
        await trainer.register(token=token)
        await trainer.publish()
        await revoke(scene, token_id_of(token))
        assert await reason_of(trainer.publish()) is Reason.SESSION_ENDED
        await scene.trainer().register(token=scene.tokens.of_role("trainer:solver"))


async def test_a_token_that_looks_and_one_that_steers_are_revoked(start_hub, recipe_of, reason_of):
    async with start_hub(recipe_of()) as scene:
        for role in ("reader", "operator"):
            token = scene.tokens.of_role(role)
            control = ControlServiceStub(scene.channel)
            await control.GetRun(pb.GetRunRequest(), metadata=bearer(token))
            await revoke(scene, token_id_of(token))
            call = control.GetRun(pb.GetRunRequest(), metadata=bearer(token))
            assert await reason_of(call) is Reason.TOKEN_INVALID


async def test_no_id_is_none(start_hub, recipe_of, reason_of):
    async with start_hub(recipe_of()) as scene:
        for text in ("", "join", "0123456G", "0" * 9):
            assert await reason_of(revoke(scene, text)) is Reason.INVALID_FIELD


@pytest.mark.parametrize("is_compacted", [False, True])
async def test_a_hub_that_comes_back_knows_what_was_revoked(start_hub, recipe_of, is_compacted):
    recipe = recipe_of()
    async with start_hub(recipe) as scene:
        token, kept = (scene.tokens.of_role("node") for _ in range(2))
        await scene.raas("revoked").join(token=token)
        await scene.raas("kept").join(token=kept)
        await revoke(scene, token_id_of(token))
    if is_compacted:
        await compact(scene.run_dir)
    async with start_hub(recipe) as scene:
        with pytest.raises(AstraflowError, match="was revoked"):
            await scene.raas("revoked").join(token=token)
        # Which session a token has opened is not forgotten either.
        answer = await revoke(scene, token_id_of(kept))
        assert len(answer.member_ids) == 1


async def test_what_a_hub_that_died_while_it_revoked_had_left_open_ends_when_it_is_back(
    start_hub, recipe_of, reason_of
):
    recipe = recipe_of()
    async with start_hub(recipe) as scene:
        token, trainer = scene.tokens.of_role("trainer:solver"), scene.trainer()
        await trainer.register(token=token)
        # The first half of what a revocation is.
        await scene.hub.take(TokenRevoked(token_id=token_id_of(token)))
    async with start_hub(recipe) as scene:
        trainer.channel = scene.channel
        assert await reason_of(trainer.keep_alive()) is Reason.SESSION_ENDED
        assert not scene.hub.status().members


async def test_a_relay_pulls_and_reports_and_takes_no_tasks(start_hub, recipe_of, reason_of):
    async with start_hub(recipe_of()) as scene:
        trainer, relay = scene.trainer(), scene.raas("relay")
        await trainer.register()
        await relay.join(token=scene.tokens.of_role("relay"))
        watch = relay.watch_versions("solver")
        await trainer.publish()
        assert (await watch.read()).version.version == 0
        await relay.report_version("solver", 0)
        assert await reason_of((await relay.open_tasks()).read()) is Reason.ROLE_NOT_ALLOWED
        for role in ("trainer", "reader"):
            with pytest.raises(AstraflowError) as caught:
                await scene.raas("other").join(token=scene.tokens.of_role(role))
            assert caught.value.reason is Reason.ROLE_NOT_ALLOWED
        with pytest.raises(AstraflowError):
            await scene.trainer().register(token=scene.tokens.of_role("relay"))


async def test_who_joins_while_a_revocation_is_written_does_not_stay(
    start_hub, recipe_of, reason_of, journal_that_waits
):
    async with start_hub(recipe_of()) as scene:
        token, late = scene.tokens.of_role("node"), scene.raas("late")
        with journal_that_waits(scene):
            revoking = asyncio.create_task(scene.hub.revoke(token_id_of(token)))
            joining = asyncio.create_task(late.join(token=token))
            # Suites never change: who asks for them after another call is answered before it.
            await scene.evals.ListEvalSuites(
                eval_pb.ListEvalSuitesRequest(), metadata=scene.operator
            )
            assert scene.hub.commits.unsafe_count
        await revoking
        with suppress(AstraflowError):
            await joining
            assert await reason_of(late.keep_alive()) is Reason.SESSION_ENDED
