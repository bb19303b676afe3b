"""Session keeping, seen through the client of a RaaS."""

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from grpc import StatusCode

from astraflow.client.raas import dial_pool
from astraflow.client.session import Held, MemberHooks
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.members import (
    Contract,
    Directive,
    DirectiveKind,
    JoinPool,
    RaasLoad,
    ServedPolicy,
)
from astraflow.core.rollouts import VersionSpan
from astraflow.core.tasks import TaskCredit
from astraflow.core.versions import VersionReport, VersionState
from astraflow.wire.rollout import encode_rollout, read_items
from astraflow_proto.dataflow.v1.raas_service_pb2 import RolloutItem, StreamRolloutsRequest
from made_up import made_up_rollout, made_up_trajectory, made_up_version

JOIN = JoinPool(
    name="raas-1",
    contract=Contract(),
    capacity=8,
    policies=(ServedPolicy(policy_id="solver", max_context_token_count=64),),
)
LIVE = VersionReport(policy_id="solver", version=0, state=VersionState.LIVE)


class Member:
    """Notes what its session says."""

    def __init__(self):
        self.opened, self.directives = [], []
        self.when_opened = lambda _: None
        self.held = Held(task_ids=("t1",))
        self.directed = asyncio.Event()

    def hooks(self):
        def open_again(session):
            self.opened.append(session)
            self.when_opened(session)

        def direct(directive):
            self.directives.append(directive)
            self.directed.set()

        return MemberHooks(
            load=lambda: RaasLoad(inflight_count=3),
            held=lambda: self.held,
            opened=open_again,
            directed=direct,
        )


@pytest.fixture
def member():
    return Member()


@pytest.fixture
def pool(fake_hub, member):
    @asynccontextmanager
    async def open_pool(token="join-secret", patience_s=5.0):
        async with dial_pool(
            fake_hub.address, token=token, join=JOIN, hooks=member.hooks(), patience_s=patience_s
        ) as client:
            yield client

    return open_pool


async def test_calls_carry_the_token_of_the_session(fake_hub, pool):
    async with pool() as client:
        membership = await client.join()
        assert membership.session.member_id == "member-1"
        await client.versions.report(LIVE)
    assert fake_hub.reports == [LIVE]


async def test_an_ended_session_is_opened_again_within_the_call(fake_hub, pool, member):
    async with pool() as client:
        await client.join()
        fake_hub.expire()
        await client.versions.report(LIVE)
    resume = fake_hub.joins[1].resume
    assert (resume.resume_token, resume.held_task_ids) == (b"session-0", ("t1",))
    assert len(member.opened) == 1
    assert fake_hub.reports == [LIVE]


async def test_many_calls_open_it_again_only_once(fake_hub, pool):
    async with pool() as client:
        await client.join()
        fake_hub.expire()
        await asyncio.gather(*(client.versions.report(LIVE) for _ in range(5)))
    assert len(fake_hub.joins) == 2
    assert len(fake_hub.reports) == 5


async def test_keep_alive_opens_an_ended_session(fake_hub, pool):
    fake_hub.keep_alive_interval = timedelta(milliseconds=5)
    async with pool() as client, asyncio.TaskGroup() as group:
        await client.join()
        keeping = group.create_task(client.session.run())
        fake_hub.expire()
        await fake_hub.until(lambda: len(fake_hub.joins) == 2 and fake_hub.loads)
        keeping.cancel()
    assert fake_hub.loads[-1].inflight_count == 3


async def test_keep_alive_outlasts_a_silent_hub(fake_hub, pool):
    fake_hub.keep_alive_interval = timedelta(milliseconds=5)
    fake_hub.fail("KeepAlive", StatusCode.UNAVAILABLE, times=5)
    async with pool() as client, asyncio.TaskGroup() as group:
        await client.join()
        keeping = group.create_task(client.session.run())
        await fake_hub.until(lambda: fake_hub.loads)
        keeping.cancel()


async def test_a_hub_that_stays_away_is_named(fake_hub, pool):
    fake_hub.keep_alive_interval = timedelta(milliseconds=5)
    async with pool(patience_s=0.2) as client:
        await client.join()
        await fake_hub.stop()
        with pytest.raises(AstraflowError, match=f"hub at {fake_hub.address}") as raised:
            await client.session.run()
    assert raised.value.reason is Reason.NOT_READY


async def test_an_order_counts_once_however_often_it_comes(fake_hub, pool, member):
    fake_hub.keep_alive_interval = timedelta(milliseconds=5)
    fake_hub.directive = Directive(kind=DirectiveKind.DRAIN, grace=timedelta(seconds=9))
    async with pool() as client, asyncio.TaskGroup() as group:
        await client.join()
        keeping = group.create_task(client.session.run())
        await member.directed.wait()
        await fake_hub.until(lambda: len(fake_hub.loads) == 3)
        keeping.cancel()
    assert member.directives == [fake_hub.directive]


async def test_a_fenced_member_does_not_come_back(fake_hub, pool):
    async with pool() as client:
        await client.join()
        fake_hub.sessions = dict.fromkeys(fake_hub.sessions, Reason.SESSION_FENCED)
        with pytest.raises(AstraflowError) as raised:
            await client.versions.report(LIVE)
    assert raised.value.reason is Reason.SESSION_FENCED
    assert len(fake_hub.joins) == 1


async def test_a_wrong_join_token_is_not_tried_twice(fake_hub, pool):
    async with pool(token="guess") as client:
        with pytest.raises(AstraflowError) as raised:
            await client.join()
    assert raised.value.reason is Reason.TOKEN_INVALID
    assert fake_hub.calls["JoinPool"] == 1


async def test_leaving_a_hub_that_is_gone_is_no_failure(fake_hub, pool):
    async with pool() as client:
        await client.join()
        await fake_hub.stop()
        await client.session.end("bye")


async def test_a_task_that_is_given_back_while_the_session_is_opened_again_is_given_back(
    fake_hub, pool, member
):
    """The hub heard just before that it is held, and so does not send it again."""
    async with pool() as client, asyncio.TaskGroup() as group:
        await client.join()
        tasks = client.tasks(credit=TaskCredit(max_outstanding=8), take=lambda _: None)
        failure = Failure(reason=Reason.ENGINE_FAILED)

        def give_back(session):
            assert session.held_task_ids == ("t1",)
            tasks.nack("t1", failure)
            # Not listed, so the hub sends it again.
            tasks.nack("t0", failure)

        member.when_opened = give_back
        running = group.create_task(tasks.run())
        await fake_hub.until(lambda: fake_hub.credits)
        fake_hub.cut("StreamTasks")
        await fake_hub.until(lambda: fake_hub.nacks)
        tasks.set_credit(TaskCredit(max_outstanding=9))
        await fake_hub.until(lambda: fake_hub.credits[-1].max_outstanding == 9)
        running.cancel()
    assert [each.task_id for each in fake_hub.nacks] == ["t1"]


async def test_a_watch_goes_on_after_the_last_version_seen(fake_hub, pool):
    seen = []
    fake_hub.publish(made_up_version("solver", 0))
    async with pool() as client:
        await client.join()
        async for info in client.versions.watch("solver"):
            seen.append(info.version)
            if info.version == 2:
                break
            fake_hub.cut("WatchVersions")
            fake_hub.versions.append(made_up_version("solver", info.version + 1))
    assert seen == [0, 1, 2]


async def test_cuts_of_a_silent_stream_add_up_only_while_the_hub_is_away(fake_hub, pool):
    fake_hub.keep_alive_interval = timedelta(milliseconds=5)
    async with pool(patience_s=0.2) as client, asyncio.TaskGroup() as group:
        await client.join()
        keeping = group.create_task(client.session.run())
        watching = group.create_task(anext(client.versions.watch("solver")))
        for number in range(1, 3):
            await fake_hub.until(lambda n=number: fake_hub.calls["WatchVersions"] == n)
            # So many take longer than patience lasts.
            beats = len(fake_hub.loads) + 60
            await fake_hub.until(lambda n=beats: len(fake_hub.loads) >= n)
            fake_hub.cut("WatchVersions")
        await fake_hub.until(lambda: fake_hub.calls["WatchVersions"] == 3)
        keeping.cancel()
        watching.cancel()


async def test_a_hub_that_comes_and_goes_is_borne_while_anybody_hears_from_it(fake_hub, pool):
    fake_hub.keep_alive_interval = timedelta(milliseconds=5)
    # The pauses between so many attempts are longer than patience lasts.
    fake_hub.fail("WatchVersions", StatusCode.UNAVAILABLE, times=5)
    fake_hub.publish(made_up_version("solver", 0))
    async with pool(patience_s=0.75) as client, asyncio.TaskGroup() as group:
        await client.join()
        keeping = group.create_task(client.session.run())
        assert (await anext(client.versions.watch("solver"))).version == 0
        keeping.cancel()


async def test_a_join_whose_answer_was_lost_waits_for_its_own_place(fake_hub, pool):
    taken = AstraflowError(Reason.NAME_TAKEN, "a member named 'raas-1' is here already")
    fake_hub.fail("JoinPool")
    fake_hub.fail("JoinPool", error=taken, times=2)
    async with pool() as client:
        await client.join()
    assert fake_hub.calls["JoinPool"] == 4


async def test_a_name_of_another_is_refused_at_once(fake_hub, pool):
    fake_hub.fail("JoinPool", error=AstraflowError(Reason.NAME_TAKEN, "raas-1 is here already"))
    async with pool() as client:
        with pytest.raises(AstraflowError, match="raas-1 is here already"):
            await client.join()
    assert fake_hub.calls["JoinPool"] == 1


@pytest.mark.parametrize(("part_count", "token_count"), [(1, 1 << 18), (1 << 17, 1)])
async def test_a_rollout_is_sent_if_the_run_reads_it(fake_hub, pool, part_count, token_count):
    fake_hub.max_message_nbytes = 64 << 20
    spans = [VersionSpan(version=0, length=token_count)]
    rollout = made_up_rollout(
        made_up_trajectory("r/0", "solver", spans),
        reward_parts={f"part {n}": 0.0 for n in range(part_count)},
    )
    item = RolloutItem(rollout=encode_rollout(rollout))
    assert item.ByteSize() > 2 << 20
    message = StreamRolloutsRequest(items=[item]).SerializeToString()
    if part_count > 1:
        with pytest.raises(AstraflowError, match="MESSAGE_TOO_LARGE"):
            read_items(message)
    else:
        assert read_items(message)
    async with pool() as client:
        await client.join()
        assert client.rollouts.send(rollout) is (part_count == 1)
