import asyncio
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from astraflow.telemetry.metrics import MetricsServer
from astraflow.testing.recipes import small_recipe
from astraflow.testing.run import start_run

PROMPTS = [{"prompt": f"row {number}", "answer": "a"} for number in range(64)]


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return answer.read().decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }


@pytest.fixture
async def told(tmp_path):
    """What a hub and a node tell of a run that trained three batches, as text."""
    suite = {"data_sets": [{"data_set": "train", "workflow": "main"}]}
    recipe = small_recipe(
        tmp_path,
        scorer="exact",
        prompts=PROMPTS,
        changes={"metrics.listen": "127.0.0.1:0", "evals.exam": suite},
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        node = await run.add_node()
        run.add_trainer()
        # The last evaluation keeps the hub up.
        await node.engine.until(lambda: node.engine.version == 3 and node.engine.pins)
        node.engine.open.clear()
        address = run.hub.metrics_address
        hub = await asyncio.to_thread(scrape, address)
        with MetricsServer("127.0.0.1:0", node.node.runner.families) as server:
            own = await asyncio.to_thread(scrape, server.address)
        node.engine.open.set()
        await run.finish()
    return hub, own


async def test_hub_and_node_tell_what_came_of_a_run(told, check_metrics):
    hub, node = told
    for text in told:
        check_metrics(text)
    said = samples(hub)
    assert said["astraflow_steps_total", "policy=solver"] == 3
    assert said["astraflow_rollouts", "place=trained", "policy=solver"] == 12
    assert said["astraflow_version", "policy=solver"] == 3
    assert said["astraflow_books_balanced", "policy=solver"] == 1
    assert said["astraflow_batch_wait_seconds_count", "policy=solver"] == 3
    assert said["astraflow_trained_staleness_versions_count", "policy=solver"] == 12
    assert said["astraflow_rollout_ack_seconds_count",] >= 12
    assert said["astraflow_hub_journal_commit_seconds_count",] > 0
    assert said["astraflow_hub_journal_bytes_total",] > 0
    assert said["astraflow_weights_pull_seconds_count", "policy=solver", "region="] >= 1
    own = samples(node)
    assert sum(v for k, v in own.items() if k[0] == "astraflow_node_rollouts_total") >= 12
    assert own["astraflow_node_pull_seconds_count", "policy=solver"] >= 1
    assert sum(v for k, v in own.items() if k[0].startswith("astraflow_node_weights_rec")) > 0
