"""One trace from the choice of a prompt to the step that used it, over real processes."""

import json
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from astraflow.config.run_dir import read_json_lines

pytestmark = pytest.mark.e2e

HUB = {"rl.prompt", "rl.task", "rl.accept", "rl.batch"}
NODE = {"rl.sample", "gen_ai.generate", "rl.reward"}
TRAINER = {"rl.train", "rl.sync"}


def test_one_trace_spans_hub_node_and_trainer(trained, check_metrics):
    run, scraped = trained
    traces: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in (run.run_dir.root / "traces").iterdir():
        for line in file.read_text().splitlines():
            span = json.loads(line)
            role = span["resource"]["attributes"]["service.name"].split("-")[1]
            traces[span["context"]["trace_id"]][role].add(span["name"])
    stepped = [trace for trace in traces.values() if "trainer" in trace]
    assert len(stepped) >= len(read_json_lines(run.run_dir.metrics))
    for trace in stepped:
        assert trace["hub"] == HUB
        assert trace["raas"] == NODE
        assert trace["trainer"] == TRAINER
    assert "astraflow_run_state" in names(scraped["hub"])
    assert "astraflow_node_rollouts" in names(scraped["raas-0"])
    assert "astraflow_trainer_steps" in names(scraped["trainer-solver"])
    for text in scraped.values():
        check_metrics(text)


def names(text: str) -> set[str]:
    return {metric.name for metric in text_string_to_metric_families(text)}
