"""GRESO, dynamic sampling and replay together, through real processes."""

import json

import pytest

from astraflow.config.run_dir import read_json_lines

from .conftest import astraflow, started

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_three_algorithms_compose_and_the_books_are_exact(tmp_path, cache):
    with started("sort-algorithms.yaml", runs=tmp_path, cache=cache) as run:
        code = run.wait()
    assert code == 0, run.output
    assert run.summary["steps"] == 8
    [books] = run.books
    assert books["balanced"]
    assert books["replayed_count"] > 0
    assert books["trained_count"] == run.summary["rollouts"]
    filtered = sum(d["count"] for d in books["drops"] if d["filter"] == "zero_advantage")
    assert filtered % 8 == 0
    assert filtered > 0
    lines = read_json_lines(run.run_dir.metrics)
    assert all(line["group/zero_std_frac"] == 0 for line in lines)
    # Three tenths of 16 groups: now 4, now 5.
    assert lines[-1]["data/replay/frac"] in (0.25, 0.3125)
    assert lines[-1]["data/select/greso/p_hard"] == 0.5
    # The journal, decided again by the same algorithms, comes to the same books.
    ledger = astraflow("ledger", str(run.run_dir.root), "--json", cache=cache)
    assert ledger.returncode == 0, ledger.stdout + ledger.stderr
    assert json.loads(ledger.stdout)
