"""What readers are told is in the journal: a hub that dies now would say the same again."""

import asyncio

from astraflow.core.events import RunPaused
from astraflow_proto.control.v1 import control_service_pb2 as control_pb
from astraflow_proto.control.v1 import ledger_service_pb2 as ledger_pb
from astraflow_proto.control.v1 import run_pb2
from astraflow_proto.evals.v1 import eval_service_pb2 as eval_pb
from astraflow_proto.weights.v1 import version_service_pb2 as version_pb
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub


def readers_of(hub):
    """Return a call of every reader, GetRun first."""
    versions = VersionServiceStub(hub.channel)
    return [
        (hub.control.GetRun, control_pb.GetRunRequest()),
        (hub.control.GetScaleAdvice, control_pb.GetScaleAdviceRequest()),
        (hub.ledger.GetLedger, ledger_pb.GetLedgerRequest()),
        (hub.ledger.ListRollouts, ledger_pb.ListRolloutsRequest(page_size=10)),
        (hub.ledger.ListDeadLetters, ledger_pb.ListDeadLettersRequest(page_size=10)),
        (hub.ledger.ExplainWait, ledger_pb.ExplainWaitRequest(policy_id="solver")),
        (versions.ListVersions, version_pb.ListVersionsRequest(policy_id="solver")),
        (versions.ListSources, version_pb.ListSourcesRequest(policy_id="solver", version=0)),
    ]


async def ask(hub, method, request):
    return await method(request, metadata=hub.operator)


async def test_a_reader_waits_for_the_journal(start_hub, recipe_of, journal_that_waits):
    async with start_hub(recipe_of()) as hub:
        trainer = hub.trainer()
        await trainer.register()
        await trainer.publish()
        watching = hub.control.WatchRun(control_pb.WatchRunRequest(), metadata=hub.operator)
        assert (await watching.read()).run.state != run_pb2.RUN_STATE_PAUSED
        with journal_that_waits(hub):
            hub.hub.apply(RunPaused())
            calls = [
                *readers_of(hub),
                # Suites never change: whoever asks last is answered before all others.
                (hub.evals.ListEvalSuites, eval_pb.ListEvalSuitesRequest()),
            ]
            *waiting, last = [asyncio.ensure_future(ask(hub, *call)) for call in calls]
            await last
            assert not [each for each in waiting if each.done()]
        run, *_ = await asyncio.gather(*waiting)
        assert run.run.state == run_pb2.RUN_STATE_PAUSED
        assert (await watching.read()).run.state == run_pb2.RUN_STATE_PAUSED
