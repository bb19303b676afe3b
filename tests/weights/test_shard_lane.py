"""Versions of which every rank serves its shard, from all ranks at once."""

from dataclasses import replace

import pytest

from astraflow.core.errors import Reason
from astraflow.core.versions import SourceInfo, SourceKind, SourceState
from astraflow.weights.fetch.lanes import joined
from astraflow.weights.fetch.puller import PullFailed, WeightPuller
from astraflow.weights.patches.layouts import Shard
from astraflow.weights.patches.patch import make_patch
from astraflow.weights.publish.background import candidate_patches
from astraflow.weights.publish.publisher import WeightPublisher, combined
from astraflow.weights.serve.relay import WeightRelay

COUNT = 3


def origin(endpoint, rank=0, count=1, **fields):
    return SourceInfo(
        kind=SourceKind.ORIGIN,
        state=SourceState.LIVE,
        endpoint=endpoint,
        shard_rank=rank,
        shard_count=count,
        **fields,
    )


@pytest.fixture
async def ranks(training, serve, request):
    """Ranks that publish what the training publishes, each on a server of its own."""
    count = getattr(request, "param", COUNT)

    class Ranks:
        def __init__(self):
            self.infos = {}
            self.publishers = [
                WeightPublisher("solver", training.layout, shard=Shard(rank=rank, count=count))
                for rank in range(count)
            ]

        def publish(self, **moved):
            version = training.publish(**moved).version
            info = combined([each.publish(version, training.tensors) for each in self.publishers])
            sources = [origin(each.address, rank, count) for rank, each in enumerate(self.servers)]
            self.infos[version] = replace(info, sources=tuple(sources))
            return self.infos[version]

        async def pull(self, puller, *sources):
            info = self.infos[max(self.infos)]
            wanted = replace(info, sources=sources or info.sources)
            return await puller.pull(wanted, self.infos, training.token)

    ranks = Ranks()
    ranks.servers = [await serve(each.store) for each in ranks.publishers]
    return ranks


async def test_a_version_comes_from_all_ranks(training, ranks, tools, puller):
    tensors = None
    for version in range(4):
        ranks.publish(share=1 if version == 2 else 0.02, is_noise=version == 2)
        pulled = await ranks.pull(puller)
        tensors = tools.live(pulled.update, tensors)
        assert training.is_live(tensors)
        assert pulled.reports[0].nbytes == pulled.nbytes
    assert pulled.update.base_version == 2


@pytest.mark.parametrize("ranks", [40], indirect=True)
async def test_a_version_comes_from_more_ranks_than_connections_are_kept_to(
    training, ranks, tools, puller
):
    ranks.publish()
    assert training.is_live(tools.live((await ranks.pull(puller)).update))


async def test_ranks_that_would_go_different_ways_go_from_version_to_version(
    training, ranks, tools, puller
):
    ranks.publish()
    tensors = tools.live((await ranks.pull(puller)).update)
    for _ in range(4):
        ranks.publish()
    for make in candidate_patches(ranks.publishers[1], 4, (4,)):
        patch = make()
        ranks.publishers[1].store.offer([] if patch is None else [patch])
    pulled = await ranks.pull(puller)
    assert pulled.update.base_version == 0
    assert training.is_live(tools.live(pulled.update, tensors))


async def test_what_an_earlier_pull_left_of_one_rank_does_not_lead_it_another_way(
    training, ranks, tools, puller
):
    ranks.publish()
    store = ranks.publishers[0].store
    (whole,) = store.patches
    chunks = [store.chunk(whole.info, index) for index in range(whole.info.chunk_count)]
    puller._holding.leftover = {whole.root: dict(enumerate(chunks))}
    info = ranks.publish()
    made = [make_patch(each.history, None, info.version) for each in ranks.publishers]
    for publisher, patch in zip(ranks.publishers, made, strict=True):
        publisher.store.offer([patch])
    patches = (*info.patches, *(patch.info for patch in made))
    ranks.infos[info.version] = replace(info, patches=patches)
    assert training.is_live(tools.live((await ranks.pull(puller)).update))


async def test_a_relay_passes_all_shards_on(training, ranks, tools, serve):
    relay = WeightRelay()
    first, second = WeightPuller("solver", relay=relay), WeightPuller("solver")
    server = await serve(relay)
    source = replace(origin(server.address), kind=SourceKind.RELAY)
    tensors = None
    ranks.publish()
    for puller in (first, second):
        await ranks.pull(puller)
    for _ in range(3):
        ranks.publish()
        await ranks.pull(first)
        pulled = await ranks.pull(second, source)
    tensors = second.full_update()
    assert pulled.nbytes
    assert training.is_live(tools.live(tensors))
    await first.close()
    await second.close()


async def test_a_rank_that_lies_is_found_out(training, ranks, tools, puller):
    ranks.publish()
    ranks.servers[2].spoil_chunk = tools.flipped
    with pytest.raises(PullFailed) as caught:
        await ranks.pull(puller)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    ranks.servers[2].spoil_chunk = lambda chunk: chunk
    assert training.is_live(tools.live((await ranks.pull(puller)).update))


async def test_a_rank_that_is_away_is_told(ranks, puller):
    ranks.publish()
    await ranks.servers[1].stop()
    with pytest.raises(PullFailed) as caught:
        await ranks.pull(puller)
    assert caught.value.reason is Reason.SOURCE_UNREACHABLE


def test_the_ranks_of_one_trainer_are_one_source():
    ranks = [origin(f"h:{n}", n, 2, member_id="t", goodput_bytes_per_s=5.0) for n in (1, 0)]
    relay = replace(origin("relay:1"), kind=SourceKind.RELAY)
    both = joined([relay, *ranks, origin("x:1")])
    assert [each.address for each in both] == ["relay:1", "h:0,h:1", "x:1"]
    assert both[1].goodput_bytes_per_s == 10.0
    assert [each.address for each in joined([ranks[0], relay])] == ["relay:1"]
