"""Versions are announced to whoever watches, and are what the run says they are."""

from dataclasses import replace
from datetime import timedelta

import pytest
from grpc import aio

from astraflow.config.run_dir import read_json_lines
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.versions import VersionState
from astraflow.rpc.access import HubTokens
from astraflow.rpc.errors import translate_errors
from astraflow.wire import versions as wire
from astraflow.wire.signatures import PatchSigner
from astraflow_proto.control.v1.control_service_pb2 import STOP_MODE_CANCEL, StopRunRequest
from astraflow_proto.weights.v1 import version_service_pb2 as pb
from astraflow_proto.weights.v1.version_service_pb2_grpc import VersionServiceStub
from made_up import made_up_version


@pytest.fixture
async def scene(start_hub, recipe_of):
    async with start_hub(recipe_of()) as scene:
        yield scene


async def members_of(scene):
    raas, trainer = scene.raas(), scene.trainer()
    await trainer.register()
    await raas.join()
    return raas, trainer


async def test_watchers_see_what_is_there_and_what_comes(scene):
    raas, trainer = await members_of(scene)
    await trainer.publish()
    watch = raas.watch_versions("solver")
    first = wire.decode_version_info((await watch.read()).version)
    assert first.version == 0
    assert first.publish_time is not None
    assert [source.endpoint for source in first.sources] == ["127.0.0.1:1"]
    await trainer.publish()
    assert (await watch.read()).version.version == 1
    later = raas.watch_versions("solver", after=0)
    assert (await later.read()).version.version == 1


async def test_a_member_has_so_many_watches(scene):
    raas, trainer = await members_of(scene)
    await trainer.publish()
    watches = []
    for _ in range(65):
        watches.append(raas.watch_versions("solver"))
        await watches[-1].read()
    await trainer.publish()
    with pytest.raises(aio.AioRpcError, match="another stream"):
        await watches[0].read()
    for watch in watches[1:]:
        assert (await watch.read()).version.version == 1


async def test_versions_and_sources_are_listed(scene):
    raas, trainer = await members_of(scene)
    await trainer.publish()
    await trainer.publish()
    stub = VersionServiceStub(scene.channel)
    listed = await stub.ListVersions(
        pb.ListVersionsRequest(policy_id="solver"), metadata=scene.operator
    )
    assert [version.version for version in listed.versions] == [0, 1]
    sources = await stub.ListSources(
        pb.ListSourcesRequest(policy_id="solver", version=1), metadata=raas.metadata
    )
    assert [source.member_id for source in sources.sources] == [trainer.member_id]


async def test_an_unknown_policy_or_version_is_refused(scene, reason_of):
    raas, trainer = await members_of(scene)
    await trainer.publish()
    watch = raas.watch_versions("nobody")
    assert await reason_of(watch.read()) is Reason.POLICY_UNKNOWN
    assert await reason_of(raas.report_version("solver", 9)) is Reason.VERSION_UNKNOWN


async def test_versions_grow_by_one(scene, reason_of):
    _, trainer = await members_of(scene)
    await trainer.publish()
    trainer.next_version = 5
    with pytest.raises(AstraflowError) as caught:
        await trainer.publish()
    assert caught.value.reason is Reason.VERSION_NOT_NEXT
    assert caught.value.metadata == {"next_version": "1"}
    trainer.next_version = 0
    await trainer.publish()
    assert trainer.next_version == 1


async def test_a_version_that_is_no_longer_listed_is_named(scene):
    raas, trainer = await members_of(scene)
    while trainer.next_version <= 64:
        trainer.step = trainer.next_version
        await trainer.publish()
    request = pb.ListSourcesRequest(policy_id="solver", version=0)
    with pytest.raises(AstraflowError) as caught, translate_errors():
        await VersionServiceStub(scene.channel).ListSources(request, metadata=raas.metadata)
    assert caught.value.reason is Reason.VERSION_EVICTED
    assert caught.value.metadata == {"version": "0"}


@pytest.mark.parametrize(
    "wrong", [{"patches": ()}, {"restored_from": 1}, {"restored_from": 7}, {"restored_from": -1}]
)
async def test_a_version_that_nobody_could_load_is_refused(scene, wrong):
    _, trainer = await members_of(scene)
    await trainer.publish()
    sound = made_up_version("solver", 1, step=1)
    with pytest.raises(AstraflowError, match=f"{Reason.INVALID_FIELD}: {next(iter(wrong))}"):
        await trainer.publish(replace(sound, **wrong))
    await trainer.publish(replace(sound, restored_from=0))
    # A repeat that adds an object store says nothing else.
    await trainer.publish(replace(sound, patches=()))


async def test_a_trainer_gets_the_key_of_its_policy_and_signs_with_it(scene, reason_of):
    trainer, tokens = scene.trainer(), HubTokens(join="join", operator="operator")
    registration = await trainer.register()
    assert registration.signing_seed == tokens.signing_seed(registration.run_id, "solver")
    assert registration.signing_seed != tokens.signing_seed(registration.run_id, "critic")
    assert registration.signing_seed.hex() not in repr(registration)
    signer = PatchSigner(registration.signing_seed)
    unsigned = replace(made_up_version("solver", 0, step=0), signing_key=signer.public_key)
    signed = [signer.signed(patch, unsigned.layout_digest) for patch in unsigned.patches]
    assert await reason_of(trainer.publish(unsigned)) is Reason.SIGNATURE_INVALID
    await trainer.publish(replace(unsigned, patches=tuple(signed)))
    assert trainer.next_version == 1
    other = replace(unsigned, patches=(), signing_key=PatchSigner(b"o" * 32).public_key)
    assert await reason_of(trainer.publish(other)) is Reason.REQUEST_CONFLICT


async def test_an_update_that_failed_is_on_record(scene):
    raas, trainer = await members_of(scene)
    await trainer.publish()
    failure = Failure(reason=Reason.DIGEST_MISMATCH, message="chunk 3 of 9")
    await raas.report_version("solver", 0, VersionState.FAILED, failure=failure)
    # The answer to the first one was lost.
    for _ in range(2):
        await raas.report_version("solver", 0, pulled_nbytes=8, pull_duration=timedelta(seconds=-1))
    assert sum(scene.hub.counters.pulled_nbytes.values()) == 8
    assert not scene.hub.counters.pull
    await raas.leave()
    await trainer.leave()
    request = StopRunRequest(mode=STOP_MODE_CANCEL)
    await scene.control.StopRun(request, metadata=scene.operator)
    await scene.serving
    rows = read_json_lines(scene.run_dir.versions)
    assert [(row["state"], row.get("reason")) for row in rows] == [
        ("failed", "DIGEST_MISMATCH"),
        ("live", None),
    ]
