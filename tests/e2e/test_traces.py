"""One trace from the choice of a prompt to the step that used it, over real processes."""

import json
import re
import urllib.request
from collections import defaultdict
from urllib.error import URLError

import pytest
from prometheus_client.parser import text_string_to_metric_families

from astraflow.config.run_dir import read_json_lines

from .conftest import started

pytestmark = pytest.mark.e2e

HUB = {"rl.prompt", "rl.task", "rl.accept", "rl.batch"}
NODE = {"rl.sample", "gen_ai.generate", "rl.reward"}
TRAINER = {"rl.train", "rl.sync"}


def test_one_trace_spans_hub_node_and_trainer(tmp_path, cache, check_metrics):
    scraped: dict[str, str] = {}
    with started(
        "sort.yaml",
        "policies.solver.trainer.step_count=4",
        "tracing.exporter=file",
        runs=tmp_path,
        cache=cache,
    ) as run:
        run.wait_for_steps(2)
        for log in (run.run_dir.root / "logs").iterdir():
            found = re.search(r"url=(http://\S+/metrics)", log.read_text())
            if found:
                scraped[log.stem] = scrape(found[1])
        assert run.wait() == 0, run.output
    traces: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in (run.run_dir.root / "traces").iterdir():
        for line in file.read_text().splitlines():
            span = json.loads(line)
            role = span["resource"]["attributes"]["service.name"].split("-")[1]
            traces[span["context"]["trace_id"]][role].add(span["name"])
    trained = [trace for trace in traces.values() if "trainer" in trace]
    assert len(trained) >= len(read_json_lines(run.run_dir.metrics))
    for trace in trained:
        assert trace["hub"] == HUB
        assert trace["raas"] == NODE
        assert trace["trainer"] == TRAINER
    assert "astraflow_run_state" in names(scraped["hub"])
    assert "astraflow_node_rollouts" in names(scraped["raas-0"])
    assert "astraflow_trainer_steps" in names(scraped["trainer-solver"])
    for text in scraped.values():
        check_metrics(text)


def scrape(url: str) -> str:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.read().decode()
    except URLError:
        return ""


def names(text: str) -> set[str]:
    return {metric.name for metric in text_string_to_metric_families(text)}
