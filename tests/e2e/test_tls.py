"""One `astraflow run` whose roles meet over TLS alone."""

import re
import signal
import ssl
import urllib.request

import pytest

from .conftest import ROOT, Run, astraflow, started

pytestmark = pytest.mark.e2e

STEPS = 3


def settings_of(place, tls, *names):
    return [f"{place}.tls.{name}={getattr(tls, name)}" for name in names]


def ended_well(run: Run, code: int = 0) -> None:
    assert run.wait() == code, run.output
    assert run.summary["steps"] >= STEPS
    assert all(account["balanced"] for account in run.books)
    logs = [path.read_text() for path in run.run_dir.log("hub").parent.glob("raas-*.log")]
    assert all("relaying weights" in log for log in logs), run.output


@pytest.mark.long
def test_hub_trainer_nodes_relays_gateway_and_agents_meet_over_tls(tmp_path, cache, pem):
    sorter = ROOT / "recipes" / "agents" / "sorter.py"
    files = [
        *settings_of("hub", pem, "certificate", "key", "ca"),
        # Their callers have no certificate of their own.
        *settings_of("http", pem, "certificate", "key"),
        *settings_of("raas.agents", pem, "certificate", "key"),
    ]
    with started(
        "sort-agent.yaml",
        *files,
        "http.port=0",
        f"workflows.sort.options.command=[python, -S, {sorter}]",
        "workflows.sort.options.persistent=4",
        f"workflows.sort.options.env={{SSL_CERT_FILE: {pem.ca}}}",
        "policies.solver.trainer.step_count=400",
        "data.held_out.limit=16",
        runs=tmp_path,
        cache=cache,
    ) as run:
        run.wait_for_steps(STEPS)
        told = astraflow("status", str(run.run_dir.root), cache=cache)
        assert told.returncode == 0, told.stderr
        (docs,) = re.findall(r"docs=(https://\S+)", run.run_dir.log("gateway").read_text())
        trusting = ssl.create_default_context(cafile=pem.ca)
        with urllib.request.urlopen(docs, context=trusting) as answer:
            assert answer.status == 200
        run.process.send_signal(signal.SIGINT)
        ended_well(run, code=130)
    nodes = run.run_dir.log("hub").parent.glob("raas-*.log")
    assert all("url=https://" in node.read_text() for node in nodes)


@pytest.mark.long
def test_roles_trust_the_certificate_of_a_hub_without_an_authority(tmp_path, cache, pem):
    files = settings_of("hub", pem, "certificate", "key")
    step_count = f"policies.solver.trainer.step_count={STEPS}"
    with started("sort.yaml", *files, step_count, runs=tmp_path, cache=cache) as run:
        ended_well(run)
