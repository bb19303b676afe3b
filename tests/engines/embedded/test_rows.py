import asyncio

import numpy as np

from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded.rows import DecodeRows, Request


async def requests(count: int) -> list[Request]:
    return [
        Request(
            prompt=np.full(1 + n, n, np.int32),
            sampling=SamplingParams(),
            stream=np.uint64(n),
            budget=4,
            version=None,
            reply=asyncio.get_running_loop().create_future(),
        )
        for n in range(count)
    ]


async def test_rows_from_the_end_fill_the_gaps():
    rows = DecodeRows(limit=16, column_limit=64)
    added = await requests(6)
    rows.add(added)
    sources, targets = rows.remove(np.array([1, 4]))
    assert (sources.tolist(), targets.tolist()) == ([5], [1])
    assert rows.requests == [added[0], added[5], added[2], added[3]]
    assert rows.fields["stream"][:4].tolist() == [0, 5, 2, 3]
    assert rows.tokens[1, :6].tolist() == [5] * 6


async def test_all_rows_can_go_at_once():
    rows = DecodeRows(limit=16, column_limit=64)
    rows.add(await requests(3))
    sources, _ = rows.remove(np.arange(3))
    assert rows.count == 0
    assert not len(sources)


async def test_tokens_grow_beyond_the_first_columns():
    rows = DecodeRows(limit=16, column_limit=200)
    rows.add(await requests(2))
    for n in range(150):
        rows.append(slice(0, 2), np.array([n, n + 1]), np.array([-n, 0], np.float32))
    tokens, logprobs = rows.sampled(0)
    assert tokens.tolist() == list(range(150))
    assert logprobs[149] == -149
