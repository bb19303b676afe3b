"""The dashboard and the alerts for Prometheus ask for metrics that there are."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana" / "dashboard.json").read_text())
ALERTS = DOCS / "grafana" / "alerts.yaml"


def queries() -> tuple[list[str], list[str]]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return panels, [rule["expr"] for rule in group["rules"]]


def test_every_metric_that_is_asked_for_is_there() -> None:
    known = set(re.findall(r"`([a-z_]+)`", (DOCS / "reference" / "metrics.md").read_text()))
    panels, alerts = queries()
    assert len(panels) > 12
    for name in re.findall(r"astraflow_([a-z_]+)", " ".join(panels + alerts)):
        assert re.sub(r"_(bucket|sum|count)$", "", name) in known


def test_panels_lie_beside_each_other() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places) == len({panel["title"] for panel in DASHBOARD["panels"]})


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool")
def test_prometheus_takes_the_rules_and_the_queries(tmp_path: Path) -> None:
    panels, _ = queries()
    rules = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(panels)]
    written = tmp_path / "panels.yaml"
    written.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", ALERTS, written], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
