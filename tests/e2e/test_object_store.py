"""Real processes whose weights go by way of a shared directory, and lie in a folder of the node."""

import json

import pytest

from .conftest import started

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_nodes_that_reach_the_store_alone_train_a_policy(tmp_path, cache):
    pytest.importorskip("fsspec")
    store, copies = tmp_path / "bucket", tmp_path / "copies"
    with started(
        "sort.yaml",
        f"policies.solver.trainer.store=file://{store}",
        "raas.sources=store",
        "raas.relay.mode=off",
        f"raas.cache={copies}",
        runs=tmp_path / "runs",
        cache=cache,
    ) as run:
        assert run.wait() == 0, run.output
    assert run.summary["steps"] == 8
    (folder,) = store.iterdir()
    assert {int(each.parent.name) for each in folder.glob("solver/*/manifest")} == set(range(9))
    live = [json.loads(line) for line in run.run_dir.versions.read_text().splitlines()]
    assert max(row["version"] for row in live if row["member"]) >= 7
    assert [*copies.glob("solver/*/record")]
